"""`python -m fanfold`: the same as the `fanfold` command."""

from .show.cli import main

main()
