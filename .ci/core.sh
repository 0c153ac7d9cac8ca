# Other builds of the C++ core, never the installed one. Sourced by sanitize and emulate from the repository's root.
PYTHON=${PYTHON:-$PWD/.venv/bin/python}

# The instruction sets that the package runs here.
isas() { "$PYTHON" -c 'from fanfold.kernels import cpu; print(*cpu.isas())'; }

# Sets `build` to the folder of $1, or to a temporary one, which goes when the script ends.
choose_build() {
  build=$1
  if [ -z "$build" ]; then
    build=$(mktemp -d)
    trap 'rm -rf "$build"' EXIT
  fi
  mkdir -p "$build"
}

configure() {  # folder, CMake's options…
  local folder=$1
  shift
  # the ninja that builds: another one on the PATH keeps another log, and all would be built once more
  "$PYTHON" -m cmake -S . -B "$folder" -G Ninja "$@" -DPython_EXECUTABLE="$PYTHON" \
    -DCMAKE_MAKE_PROGRAM="$("$PYTHON" -c 'import ninja; print(ninja.BIN_DIR)')/ninja" \
    -Dnanobind_DIR="$("$PYTHON" -m nanobind --cmake_dir)" >"$folder.log" || { cat "$folder.log"; return 1; }
}

make_target() { "$PYTHON" -m ninja -C "$1" "$2" >"$1.log" || { tail -50 "$1.log"; return 1; }; }

# The package with the extension module of folder $1, for PYTHONPATH: $build/package.
make_package() {
  make_target "$1" _cpu
  rm -rf "$build/package"
  mkdir -p "$build/package"
  cp -r src/fanfold "$build/package/"
  rm -f "$build"/package/fanfold/kernels/_cpu*.so
  cp "$1"/_cpu*.so "$build/package/fanfold/kernels/"
  # An editable install finds the package by a hook of its own, before any path: away with it.
  printf '%s\n' 'import sys' 'sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]' \
    >"$build/package/sitecustomize.py"
}
