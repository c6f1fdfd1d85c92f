# Source this from a bash script. It sets `root` (the checkout) and `python` (an environment with flowrl and its
# development tools): the active virtual environment, or .venv in the checkout, which it makes. The second time it
# does nothing. PYTHON=/path/to/python3.12 picks the interpreter for a new .venv.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup: expected Python 3.11 or newer, found $(python3 --version 2>&1); set PYTHON=/path/to/python" >&2
    return 1
}

if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    VIRTUAL_ENV=$root/.venv
    if ! "$VIRTUAL_ENV/bin/python" -m pip --version >/dev/null 2>&1; then
        interpreter=$(_find_python)
        echo "==> making .venv with $interpreter"
        if ! "$interpreter" -m venv --clear "$VIRTUAL_ENV"; then
            echo "setup: $interpreter cannot make virtual environments (Debian, Ubuntu: apt install python3-venv)" >&2
            exit 1
        fi
    fi
    export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
fi
python=$VIRTUAL_ENV/bin/python

# The checkout's path belongs into the mark: an environment can serve one checkout at a time.
_mark=$VIRTUAL_ENV/.flowrl-$( (echo "$root"; cat "$root/pyproject.toml") | cksum | cut -d ' ' -f 1)
if [[ ! -e "$_mark" ]]; then
    echo "==> installing flowrl into $VIRTUAL_ENV (with PyTorch: a few GB, some minutes the first time)"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input --editable "${root}[dev]" </dev/null
    rm -f "$VIRTUAL_ENV"/.flowrl-*
    touch "$_mark"
fi
