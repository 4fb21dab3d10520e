#!/usr/bin/env bash
# Names the Debian packages that are missing for a task (build, test, lint, cache), or installs them.
#
#   system_packages.sh build             exits 1 and names what to install
#   system_packages.sh --install lint    installs it (root)
#
# cache: ccache, which nothing needs and every build after the first is faster with.
set -euo pipefail

install=0
if [[ ${1:-} == --install ]]; then
  install=1
  shift
fi

missing=()
needs_command() { command -v "$1" >/dev/null || missing+=("$2"); }

needs_command "${PYTHON:-python3}" python3
needs_command g++ g++
needs_command make make
if command -v "${PYTHON:-python3}" >/dev/null; then
  "${PYTHON:-python3}" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
  "${PYTHON:-python3}" - <<'PY' || missing+=(python3-dev)
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file())
PY
else
  missing+=(python3-venv python3-dev)
fi
for task in "$@"; do
  case $task in
    build) ;;
    test)
      needs_command cmake cmake
      needs_command ninja ninja-build
      find /usr/include /usr/local/include -path '*gtest/gtest.h' 2>/dev/null | grep -q . || missing+=(libgtest-dev)
      ;;
    lint)
      needs_command clang-format clang-format
      needs_command clang-tidy clang-tidy
      ;;
    cache) needs_command ccache ccache ;;
    *)
      echo "system_packages.sh: no task '$task'; there are build, test, lint, cache" >&2
      exit 2
      ;;
  esac
done

[[ ${#missing[@]} -eq 0 ]] && exit 0
if [[ $install -eq 1 ]]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq </dev/null
  apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null
  exit 0
fi
echo "Missing Debian packages for $*. Install them with:" >&2
echo "  apt-get install ${missing[*]}" >&2
exit 1
