#!/bin/sh
# Run the torch-free half's tests in an environment without torch, on each of Python 3.10 to 3.13 that is installed.
set -eu
cd "$(dirname "$0")/../.."

# A version's interpreter on PATH that really starts (version managers leave stubs that do not), or pyenv's own copy.
find_python() {
    if "python$1" -c pass 2>/dev/null; then
        command -v "python$1"
        return
    fi
    for candidate in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        if [ -x "$candidate" ]; then
            echo "$candidate"
            return
        fi
    done
}

ran=0
for version in 3.10 3.11 3.12 3.13; do
    python=$(find_python "$version")
    if [ -z "$python" ]; then
        echo "Python $version: not installed, skipped"
        continue
    fi
    venv=".venv-light-$version"
    if [ ! -e "$venv/.ready" ] || [ pyproject.toml -nt "$venv/.ready" ]; then
        "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --upgrade "pip>=25.1"
        "$venv/bin/python" -m pip install --quiet --group light
        "$venv/bin/python" -m pip install --quiet --no-deps --editable .
        touch "$venv/.ready"
    fi
    if "$venv/bin/python" -c "import torch" 2>/dev/null; then
        echo "Python $version: torch is installed in $venv, which proves nothing" >&2
        exit 1
    fi
    echo "Python $version"
    "$venv/bin/python" -m pytest --quiet -p no:cacheprovider -n 2 tests/light
    ran=$((ran + 1))
done
[ "$ran" -gt 0 ] || { echo "no Python from 3.10 to 3.13 was found" >&2; exit 1; }
