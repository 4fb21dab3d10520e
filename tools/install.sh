#!/usr/bin/env bash
# Installs torchext from this source tree into VENV, a thin environment over DEPS: install.sh DEPS VENV
# Does nothing when sources, torch, Python and the settings of the build are those of the last time.
set -euo pipefail
deps=$1 venv=$2
# Not resolved further: a virtual environment is known by the path of its python, a link.
export PATH="$deps/bin:$PATH"

site=$("$deps/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [[ ! -x $venv/bin/python || $(cat "$venv/deps" 2>/dev/null) != "$deps" ]]; then
  rm -rf "$venv"
  "$deps/bin/python" -m venv --without-pip "$venv"
  own=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$site" >"$own/dependencies.pth"
  echo "$deps" >"$venv/deps"
fi

key=$({
  find csrc kernels torchext tools -type f ! -name '*.so' ! -name '*.pyc' ! -name '_build_info.json' -print0 |
    sort -z | xargs -0 sha256sum
  sha256sum setup.py pyproject.toml MANIFEST.in _torchext_autoload.py _torchext_lightning.py torchext_warm.py
  "$venv/bin/python" -VV
  "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))'
  echo "${TORCHEXT_CUDA:-auto} ${TORCH_CUDA_ARCH_LIST:-} ${CUDA_HOME:-} ${CXX:-} ${CXXFLAGS:-}"
} | sha256sum)
[[ $(cat "$venv/installed" 2>/dev/null) == "$key" && -e torchext/_build_info.json ]] && exit 0

echo "Building and installing torchext."
if [[ -z ${CXX:-} ]] && command -v ccache >/dev/null; then
  export CXX="ccache g++"
  export CCACHE_BASEDIR= # a user's setting of it rewrites the paths that -ffile-prefix-map is to take out
fi
rm -rf build/lib.* dist ./*.egg-info # files that are gone from the source must be gone from the package
rm -f "$venv/installed"
log=build/install.log
mkdir -p build
# By way of a wheel, which the packaging tests look into.
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
if ! { "${pip[@]}" wheel --no-build-isolation --no-deps --verbose --wheel-dir dist . &&
  "${pip[@]}" install --no-deps --force-reinstall dist/torchext-*.whl; } </dev/null >"$log" 2>&1; then
  grep -E "error( [A-Z0-9]+)?: |^ *torchext: |TORCHEXT_" "$log" | head -n 40 >&2 || tail -n 40 "$log" >&2
  echo "The build failed; all of its output is in $log" >&2
  exit 1
fi
# The source folder gets the native modules too: scripts and tests that start there find its torchext first.
rm -f torchext/*.so
"$venv/bin/python" -c 'import glob, sys, zipfile
archive = zipfile.ZipFile(*glob.glob("dist/torchext-*.whl"))
built = [n for n in archive.namelist() if n.endswith((".so", "_build_info.json"))]
archive.extractall(".", built)'
sed -n '/torchext was built:/,/compiler /p' "$log"
echo "$key" >"$venv/installed"
