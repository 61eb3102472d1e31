#!/usr/bin/env bash
# Prepares a node, the same way each time: an environment with graphpool and its pinned packages in ~/graphpool-env.
# It installs again only when the wheel, the pins or the extra packages have changed. Any failure ends `ray up`.
#
#   setup.sh [PACKAGE ...]      more packages for this node, such as boto3 on an AWS head
set -euo pipefail

files=~/graphpool
environment=~/graphpool-env

make_environment() {
    local name
    # The machine's image decides which of these is there; graphpool needs 3.11 to 3.13. Debian's has no ensurepip by itself.
    for name in python3.12 python3.13 python3.11; do
        if "$name" -c 'import ensurepip' 2>/dev/null; then "$name" -m venv "$environment"; return; fi
    done
    echo 'no Python 3.11, 3.12 or 3.13 with venv here: install python3.12 and python3.12-venv' >&2
    return 1
}

install() {
    local wanted
    wanted=$(cat "$files"/wheel/graphpool-*.whl "$files/constraints.txt" <(echo "$@") | sha256sum)
    [ "$(cat "$environment/installed" 2>/dev/null)" != "$wanted" ] || return 0
    [ -x "$environment/bin/python" ] || make_environment
    "$environment/bin/python" -m pip install --quiet --force-reinstall --no-deps "$files"/wheel/graphpool-*.whl
    "$environment/bin/python" -m pip install --quiet --constraint "$files/constraints.txt" "$files"/wheel/graphpool-*.whl
    # Without the pins, which hold for what graphpool needs: a cloud's client may need an older version of something else.
    [ $# = 0 ] || "$environment/bin/python" -m pip install --quiet "$@"
    echo "$wanted" >"$environment/installed"
}

install "$@"
# `ray exec` and `ray down` run plain `ray`: without this they do not find it, and say so only in passing.
path_line='export PATH="$HOME/graphpool-env/bin:$PATH"'
grep -qxF "$path_line" ~/.bashrc 2>/dev/null || echo "$path_line" >>~/.bashrc
# Ray makes its token file readable by everybody; nobody else needs it.
chmod 600 ~/.ray/auth_token
# Shows what this node has: driver, GPU, packages, memory. Exit code 1, which ends `ray up`: it cannot serve.
"$environment/bin/graphpool" doctor
