#!/usr/bin/env bash
# Builds and tests against other versions of torch, each in a copy of the tree with its own builds:
#   matrix.sh torch==2.11.0 ...
# The copies keep their builds, so the second time only what changed is compiled.
set -euo pipefail
home=${DEPS_HOME:-$PWD/.cache}

for torch in "$@"; do
  copy=build-matrix/${torch//[^0-9.a-z]/-}
  echo "== $torch"
  mkdir -p "$copy"
  # What git would commit, files of the last copy that are gone removed.
  git ls-files --cached --others --exclude-standard -z >"$copy.files"
  (cd "$copy" && find . -path ./build -prune -o -path './build-*' -prune -o -path ./.venv -prune -o -type f -print0) |
    sed -z 's|^\./||' | sort -z >"$copy.old"
  sort -z "$copy.files" | comm -z -13 - "$copy.old" | (cd "$copy" && xargs -0 -r rm -f)
  # Files staged but deleted in the working tree are skipped.
  tar --null --ignore-failed-read -T "$copy.files" -cf - | tar -C "$copy" -xf -
  make -C "$copy" --no-print-directory test TORCH="$torch" DEPS_HOME="$home" ${MATRIX_DEPS:+DEPS="$MATRIX_DEPS"}
done
