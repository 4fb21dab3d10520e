#!/usr/bin/env bash
# Makes the environment of `make docs` once: make_docs_env.sh PYTHON FOLDER
set -euo pipefail
python=$1 folder=$2
[[ -e $folder/complete ]] && exit 0
mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock" # two checkouts may share the folder
flock 9
[[ -e $folder/complete ]] && exit 0
rm -rf "$folder"
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt </dev/null
touch "$folder/complete"
