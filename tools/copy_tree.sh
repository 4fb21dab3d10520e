#!/usr/bin/env bash
# Copies what git would commit into FOLDER, removes what is gone, and keeps the builds there: copy_tree.sh FOLDER
set -euo pipefail
copy=$1
mkdir -p "$copy"
lists=$(mktemp -d)
trap 'rm -rf "$lists"' EXIT
git ls-files --cached --others --exclude-standard -z | sort -z >"$lists/new"
(cd "$copy" && find . \( -path ./build -o -path './build-*' -o -path ./.venv \) -prune -o -type f ! -name '*.so' -print0) |
  sed -z 's|^\./||' | sort -z >"$lists/old"
comm -z -13 "$lists/new" "$lists/old" | (cd "$copy" && xargs -0 -r rm -f)
# Files staged but deleted in the working tree are skipped.
tar --null --ignore-failed-read -T "$lists/new" -cf - | tar -C "$copy" -xf -
