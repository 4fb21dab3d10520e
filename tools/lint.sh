#!/usr/bin/env bash
# All checks of style and types; goes on after a failure and fails at the end: lint.sh PYTHON CACHE C++-FILES...
# CACHE is a folder in which results are remembered, for other clones, too.
set -uo pipefail
python=$1 cache=$2
shift 2
bash tools/system_packages.sh lint || exit 1

failed=()
check() {
  local name=$1
  shift
  echo "== $name"
  "$@" </dev/null || failed+=("$name")
}

check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
# mypy --strict comes from pyproject.toml, with the packages it looks at.
check "mypy --strict" "$python" -m mypy --cache-dir "$cache/mypy"
check "clang-format" clang-format --dry-run -Werror "$@"
check "layers" "$python" tools/check_layers.py
check "pages" "$python" tools/check_docs.py
check "prose" "$python" tools/check_prose.py
check "result tables" "$python" tools/result_tables.py --check
check "clang-tidy" "$python" tools/clang_tidy.py "$cache/clang-tidy"

if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'lint: failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
echo "lint: clean"
