# Sourced by the scripts beside it: finds a Python, makes .venv, installs the package into it.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
export PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*" >&2; }

die() {
  say "$0: $*"
  exit 1
}

# True if the command is a Python that jaxserve runs on, with what is needed to make a virtual environment.
python_fits() {
  "$1" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

# Prints a Python >= 3.12: $PYTHON if set, else one on the PATH, of pyenv, or managed by uv. Fails if there is none.
find_python() {
  local candidate
  if [ -n "${PYTHON-}" ]; then
    python_fits "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.12 or newer"
    printf '%s\n' "$PYTHON"
    return
  fi
  for candidate in python3.13 python3.12 python3 python3.14 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    if python_fits "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  if command -v uv >/dev/null && candidate=$(uv python find '>=3.12' 2>/dev/null) && python_fits "$candidate"; then
    printf '%s\n' "$candidate"
    return
  fi
  return 1
}

explain_python() {
  say "jaxserve needs Python 3.12 or newer, and none was found."
  say "Install one, then run $0 again:"
  say "  Debian, Ubuntu   sudo apt-get install python3.12 python3.12-venv   (or: uv python install 3.12)"
  say "  Fedora           sudo dnf install python3.12"
  say "  macOS            brew install python@3.12"
  say "  pyenv            pyenv install 3.12"
  say "Or name one: PYTHON=/path/to/python3.12 $0"
}

make_venv() {
  local python
  if [ -x "$VENV/bin/python" ] && python_fits "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  python=$(find_python) || {
    [ -n "${PYTHON-}" ] || explain_python
    exit 1
  }
  say "Making $VENV with $("$python" --version)"
  "$python" -m venv --clear "$VENV" >&2 && return
  rm -rf "$VENV"
  command -v uv >/dev/null && uv venv --quiet --seed --python "$python" "$VENV" && return
  die "$python cannot make a virtual environment. On Debian and Ubuntu: sudo apt-get install python3-venv"
}

# The extra for this machine's accelerator: JAXSERVE_EXTRA (cuda, tpu, or cpu for none), else cuda if a GPU is visible.
accelerator_extra() {
  case ${JAXSERVE_EXTRA-auto} in
    auto) if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo cuda; fi ;;
    cuda | tpu) echo "$JAXSERVE_EXTRA" ;;
    cpu | '') ;;
    *) die "JAXSERVE_EXTRA must be cuda, tpu or cpu, got '$JAXSERVE_EXTRA'" ;;
  esac
}

# The extras that bring the compilers for TPUs and NVIDIA GPUs, for tests of what is compiled for those: that needs none, and
# there are wheels of them for such hosts alone.
compiler_extras() {
  if [ -z "$(accelerator_extra)" ] && [ "$(uname -sm)" = "Linux x86_64" ]; then echo tpu cuda-compiler; fi
}

# Without an accelerator JAX runs on the CPU anyway, and complains of missing TPUs if .venv has their compiler.
expect_no_accelerator() {
  if [ -z "$(accelerator_extra)" ]; then export JAX_PLATFORMS="${JAX_PLATFORMS-cpu}"; fi
}

# install EXTRA...: the package, editable, with extras. Does nothing for those that were installed from this pyproject.toml.
install() {
  local accelerator extra extras wanted missing=''
  make_venv
  accelerator=$(accelerator_extra) || exit 1
  extras=("$@" ${accelerator:+"$accelerator"})
  wanted=$("$VENV/bin/python" -c '
import hashlib, pathlib, sys
print(hashlib.sha256(pathlib.Path(sys.argv[1]).read_bytes()).hexdigest())' "$ROOT/pyproject.toml")
  for extra in "${extras[@]}"; do
    [ "$(cat "$VENV/.installed-$extra" 2>/dev/null)" = "$wanted" ] || missing=$missing${missing:+,}$extra
  done
  [ -n "$missing" ] || return 0
  say "Installing jaxserve[$missing] into $VENV (minutes, the first time)"
  "$VENV/bin/python" -m pip install --quiet --editable "${ROOT}[$missing]" >&2 || die "the installation failed: see above"
  for extra in "${extras[@]}"; do
    printf '%s\n' "$wanted" >"$VENV/.installed-$extra"
  done
}

# install_floors EXTRA: what the package and one extra need, at the lowest versions that pyproject.toml allows, in a
# virtual environment of their own. It is made anew when pyproject.toml changes: what is there would stay.
install_floors() {
  VENV=$ROOT/.venv-floors
  [ "$VENV/.installed-dev" -nt "$ROOT/pyproject.toml" ] && return
  rm -rf "$VENV"
  make_venv
  "$VENV/bin/python" -m pip install --quiet uv >&2 || die "uv cannot be installed: see above"
  "$VENV/bin/python" -m uv pip install --python "$VENV/bin/python" --no-build --resolution lowest-direct \
    --requirements "$ROOT/pyproject.toml" --extra "$1" >&2 || die "the lowest versions cannot be installed: see above"
}
