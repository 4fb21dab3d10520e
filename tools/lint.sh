#!/usr/bin/env bash
# All checks of style and types; goes on after a failure and fails at the end: lint.sh PYTHON C++-FILES...
set -uo pipefail
python=$1
shift
bash tools/system_packages.sh lint || exit 1

failed=()
check() {
  local name=$1
  shift
  echo "== $name"
  "$@" </dev/null || failed+=("$name")
}

tidy() {
  local launcher=()
  command -v ccache >/dev/null && launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
  cmake -S . -B build-cpp -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON "${launcher[@]}" >build-cpp.log ||
    { cat build-cpp.log; return 1; }
  rm build-cpp.log
  # The libraries' sources; not the tests, where GoogleTest's macros cost half a minute a file.
  "$python" - <<'PY' | xargs -P "${MAX_JOBS:-2}" -n 2 clang-tidy -p build-cpp --quiet --warnings-as-errors='*' 2>&1 |
import json, pathlib
for entry in json.loads(pathlib.Path("build-cpp/compile_commands.json").read_text()):
    if "csrc" in pathlib.Path(entry["file"]).relative_to(pathlib.Path.cwd()).parts:
        print(entry["file"])
PY
    grep -vE '^[0-9]+ warnings? generated|^Suppressed|^Use -header-filter'
  local status=${PIPESTATUS[1]}
  # The loops of the kernels are headers that need no torch.
  clang-tidy --quiet --warnings-as-errors='*' kernels/cpu/*.h -- -x c++ -std=c++20 -I. 2>/dev/null || status=1
  return "$status"
}

check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
# mypy --strict comes from pyproject.toml, with the packages it looks at.
check "mypy --strict" "$python" -m mypy
check "clang-format" clang-format --dry-run -Werror "$@"
check "clang-tidy" tidy

if [[ ${#failed[@]} -gt 0 ]]; then
  printf 'lint: failed: %s\n' "${failed[*]}" >&2
  exit 1
fi
echo "lint: clean"
