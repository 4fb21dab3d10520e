#!/usr/bin/env bash
# Makes the environment of dependencies once: make_deps.sh PYTHON FOLDER TORCH_REQUIREMENT
set -euo pipefail
python=$1 folder=$2 torch=$3

# A finished environment, or one the caller brought along.
[[ -e $folder/complete ]] && exit 0
if [[ -x $folder/bin/python && $(basename "$folder") != deps-* ]]; then
  "$folder/bin/python" - "$folder" <<'PY'
import importlib.metadata, pathlib, sys

lacking = []
for requirement in ["torch", *pathlib.Path("requirements-dev.txt").read_text().splitlines()]:
    name = requirement.partition("==")[0].partition("[")[0]
    try:
        version = "" if name.startswith("#") else importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        lacking.append(requirement)
    else:
        # Before this the build backend cannot read pyproject.toml.
        if name == "setuptools" and int(version.partition(".")[0]) < 77:
            lacking.append(f"{requirement} (it has {version})")
sys.exit(f"DEPS={sys.argv[1]} lacks: {', '.join(lacking)}" if lacking else 0)
PY
  exit 0
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
