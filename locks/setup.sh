#!/usr/bin/env bash
# What `make setup` does: .venv with exactly the lock, the project itself in editable form, and a proof that it imports.
# A second call does nothing while the lock, pyproject.toml and these scripts are the same. Runs from the repository's root.
set -euo pipefail

PYTHON=${PYTHON:-python3.11}
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
LOCK=locks/dev-py311.txt
VENV=.venv
STAMP=$VENV/.setup-stamp
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

exec 9<locks/setup.sh
flock 9 # two `make check` at once must not both install

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# As root on Debian the missing package is installed, else it is named.
need_debian_package() {
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing $1 ($2)"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1"; } >/dev/null
    else
        die "$2. Install it (Debian, Ubuntu: apt-get install $1), then run make setup again."
    fi
}

find_python() {
    local candidate
    for candidate in "$PYTHON" python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "found no Python 3.11 as $PYTHON or python3. Install it, or name it: make setup PYTHON=/path/to/python3.11"
}

# The folder is part of it: a venv that was moved is a broken one.
# Of pyproject.toml only what is installed counts, not the tools' settings below it.
wanted=$({ echo "$PWD"; sed '/^\[tool\.pytest/,$d' pyproject.toml; sha256sum $LOCK locks/setup.sh locks/smoke_import.py locks/pip-check-allowed.txt; } | sha256sum)
if [ "$(cat $STAMP 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

python=$(find_python)
"$python" -c 'import ensurepip' 2>/dev/null || need_debian_package python3.11-venv "$python has no ensurepip, so it cannot make a venv"
"$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || need_debian_package libnuma1 "vLLM's CPU kernels link libnuma.so.1"

[ -x $VENV/bin/pip ] && $VENV/bin/pip --version >/dev/null 2>&1 || "$python" -m venv --clear $VENV

# PyPI has no +cpu wheel of torch. PyTorch's own index is asked only if what pip is configured with has none either.
index=()
torch=$(grep -oE '^torch==[^ ]+' $LOCK)
if ! $VENV/bin/pip install --dry-run --quiet --no-deps --only-binary :all: "$torch" 2>/dev/null; then
    [ -n "$TORCH_INDEX" ] || die "pip finds no $torch and TORCH_INDEX is empty"
    say "pip finds no $torch; taking it from $TORCH_INDEX (its hash is in the lock)"
    index=(--extra-index-url "$TORCH_INDEX")
fi

# uv installs the lock in about a minute, pip in up to ten, but only pip sees a torch that pip is configured to find. So: uv and
# torch by pip, the rest by uv; by pip where uv cannot (an index that is named in pip's configuration alone).
paragraph() { awk -v name="$1" '/^[a-z0-9]/ {mine = ($0 ~ "^" name "==")} mine' $LOCK; }
rest() { awk '/^[a-z0-9]/ {mine = !($0 ~ /^torch==/)} mine' $LOCK; }
pip_install() { $VENV/bin/pip install --quiet --no-deps --require-hashes --only-binary :all: "$@"; }

say "installing $(grep -c == $LOCK) packages of $LOCK into $VENV (4 GB, some minutes the first time)"
lock_parts=$(mktemp -d)
trap 'rm -rf "$lock_parts"' EXIT
paragraph uv >"$lock_parts/uv.txt"
paragraph torch >"$lock_parts/torch.txt"
rest >"$lock_parts/rest.txt"
pip_install -r "$lock_parts/uv.txt"
pip_install "${index[@]}" -r "$lock_parts/torch.txt"
$VENV/bin/uv pip install --quiet --python $VENV/bin/python --no-deps --require-hashes --only-binary :all: -r "$lock_parts/rest.txt" \
    || { say "uv could not; pip installs it"; pip_install -r "$lock_parts/rest.txt"; }
$VENV/bin/pip install --quiet --no-deps --no-build-isolation --editable .

allowed=$(grep -v '^#' locks/pip-check-allowed.txt | sed 's/  *#.*//' | sort)
found=$($VENV/bin/pip check | grep -v '^No broken requirements' | sort || true)
unknown=$(comm -13 <(echo "$allowed") <(echo "$found") | sed '/^$/d')
[ -z "$unknown" ] || die "pip check reports what locks/pip-check-allowed.txt does not name:"$'\n'"$unknown"

$VENV/bin/python locks/smoke_import.py
echo "$wanted" >$STAMP
say "done"
