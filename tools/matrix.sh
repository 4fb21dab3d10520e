#!/usr/bin/env bash
# Builds and tests against other versions of torch, each in a copy of the tree with its own builds:
#   matrix.sh torch==2.11.0 ...
# MATRIX_DEPS: a virtual environment that has that torch and requirements-dev.txt, instead of making one.
# The copies keep their builds, so the second time only what changed is compiled.
set -euo pipefail
home=${DEPS_HOME:-$PWD/.cache}

for torch in "$@"; do
  copy=build-matrix/${torch//[^0-9.a-z]/-}
  echo "== $torch"
  if [[ -n ${MATRIX_DEPS:-} ]]; then
    version=$("$MATRIX_DEPS/bin/python" -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])')
    if [[ $torch != "torch==$version" ]]; then
      echo "MATRIX_DEPS=$MATRIX_DEPS has torch $version, not $torch" >&2
      exit 1
    fi
  fi
  bash tools/copy_tree.sh "$copy"
  # The C++ suites know no torch and are left to the tree itself.
  # Without the caller's DEPS, be it of the environment or of make's command line: that is the torch of this tree.
  env -u DEPS -u MAKEFLAGS make -C "$copy" --no-print-directory test TORCH="$torch" DEPS_HOME="$home" \
    SUITES="python distributed packaging" ${MATRIX_DEPS:+DEPS="$MATRIX_DEPS"}
done
