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
# What is equal keeps its time, what is new gets the time of copying: a build there sees every change, also that of a file
# that was edited here while the last build ran there.
while IFS= read -r -d '' file; do
  [[ -f $file ]] || continue # staged, but deleted in the working tree
  cmp -s "$file" "$copy/$file" && continue
  mkdir -p "$copy/$(dirname "$file")"
  cp "$file" "$copy/$file"
done <"$lists/new"
