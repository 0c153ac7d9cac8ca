"""Pages to look at: one self-contained HTML file each, made from plain dictionaries."""

from __future__ import annotations

from .reading import fragment, page

__all__ = ["fragment", "page"]
