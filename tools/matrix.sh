#!/usr/bin/env bash
# Builds and tests against other versions of torch, each in a copy of the tree with its own builds:
#   matrix.sh torch==2.11.0 ...
# The copies keep their builds, so the second time only what changed is compiled.
set -euo pipefail
home=${DEPS_HOME:-$PWD/.cache}

for torch in "$@"; do
  copy=build-matrix/${torch//[^0-9.a-z]/-}
  echo "== $torch"
  bash tools/copy_tree.sh "$copy"
  make -C "$copy" --no-print-directory test TORCH="$torch" DEPS_HOME="$home" ${MATRIX_DEPS:+DEPS="$MATRIX_DEPS"}
done
