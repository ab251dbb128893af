#!/usr/bin/env bash
# Build wheel and sdist into dist/ and test them in fresh environments: `make wheel`.
#
# Each environment takes its other packages from .venv (torch is gigabytes), but not this project: what is tested is the
# file that was built. Every Python of 3.11 and newer that is on the PATH, and for which torch is at hand, takes part.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
make --no-print-directory setup
rm -rf dist build/packages
mkdir -p dist build/packages
say() { printf '\n== %s\n' "$*"; }

say "build wheel and sdist (isolated: only what pyproject.toml requires, and torch is not among it)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build
.venv/bin/python -m build --outdir dist . > build/packages/build.log 2>&1 || { tail -30 build/packages/build.log; exit 1; }
ls -l dist
if grep -Eiq '(collecting|installing).*\btorch\b' build/packages/build.log; then echo "torch was needed to build"; exit 1; fi

# environment PYTHON NAME FILE [CXX]: an environment with the packages of .venv, and FILE installed into it.
environment() {
  local python=$1 name=$2 file=$3 compiler=${4-}
  local folder=build/packages/$name
  "$python" -m venv "$folder"
  # Packages of .venv are seen, this project's editable installation is not: its finder lies in a .pth file there, and
  # such files of folders that a .pth adds are not read.
  "$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
  env ${compiler:+CXX=$compiler} PATH="$root/.venv/bin:$PATH" "$folder/bin/python" -m pip install --quiet \
    --disable-pip-version-check --no-deps --force-reinstall "$file"
  (cd build/packages && "$root/$folder/bin/python" "$root/tests/installed.py" "$root/src" "${compiler:+without-core}")
}

wheel=$(ls dist/*.whl)
sdist=$(ls dist/*.tar.gz)
own=$(.venv/bin/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
say "$own: the wheel"
environment .venv/bin/python wheel "$wheel"
say "$own: the sdist, with a compiler"
environment .venv/bin/python sdist "$sdist"
say "$own: the sdist, without a compiler"
environment .venv/bin/python sdist-without "$sdist" /bin/false
for version in 3.11 3.12 3.13 3.14; do
  [ "python$version" != "$own" ] || continue
  if ! command -v "python$version" > /dev/null; then
    echo "python$version is not installed here: not tested"
  elif ! "python$version" -c 'import torch, transformers' 2> /dev/null; then
    echo "python$version has no torch and transformers of its own: not tested (the packages of .venv are $own's)"
  else
    say "python$version: the wheel"
    "python$version" -m venv --system-site-packages "build/packages/wheel-$version"
    "build/packages/wheel-$version/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
    (cd build/packages && "$root/build/packages/wheel-$version/bin/python" "$root/tests/installed.py" "$root/src")
  fi
done
say "all packages work"
