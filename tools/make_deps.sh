#!/usr/bin/env bash
# Makes the environment of dependencies once: make_deps.sh PYTHON FOLDER TORCH_REQUIREMENT
set -euo pipefail
python=$1 folder=$2 torch=$3

# A finished environment, or one the caller brought along.
[[ -e $folder/complete ]] && exit 0
if [[ -x $folder/bin/python && $(basename "$folder") != deps-* ]]; then
  "$folder/bin/python" -c 'import torch, numpy, setuptools, pytest' && exit 0
  echo "DEPS=$folder lacks something of: torch, $(grep -v '^#' requirements-dev.txt | paste -sd' ')" >&2
  exit 1
fi

mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"  # two checkouts may share the folder
flock 9
[[ -e $folder/complete ]] && exit 0
echo "Making the environment of dependencies ($torch and its CUDA libraries are some 5 GB)."
rm -rf "$folder"  # what an interrupted run left
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$torch" -r requirements-dev.txt </dev/null
touch "$folder/complete"
