#!/usr/bin/env bash
# Install into .peers the systems that `make bench-exchange` compares torchmn with, besides torch:
# torchft; Horovod, which is compiled for some minutes and needs cmake, make and g++; and CNTK
# 2.7, which needs a Python 3.6 (PYTHON36=...) and the Open MPI 4 of Debian or Ubuntu.
# For `make bench-lm`: torchft.
# Nothing is installed outside of .peers, and no benchmark requires it.
#
#     setup_peers.sh [torchft] [horovod] [cntk]     # all of them by default
set -u
cd "$(dirname "$0")/.." || exit 1
readonly PEERS="$PWD/.peers"

report() { echo "setup_peers: $1"; }

torchft() {
  .venv/bin/python -m pip install -q --target "$PEERS/torchft" --no-deps torchft-nightly &&
    .venv/bin/python -m pip install -q --target "$PEERS/torchft" \
      opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
}

# For PyTorch on CPUs, over gloo. The headers of torch need C++20, and 0.28.1 asks for C++14.
horovod() ( # a subshell: PYTHONPATH is for the build only
  local tool source="$PEERS/horovod-source"
  for tool in cmake make g++; do
    command -v "$tool" >/dev/null ||
      { report "Horovod needs $tool: apt-get install cmake make g++"; return 1; }
  done
  rm -rf "$source" "$PEERS/horovod" && mkdir -p "$source" &&
    .venv/bin/python -m pip install -q --target "$source/tools" setuptools packaging &&
    export PYTHONPATH="$source/tools" &&
    .venv/bin/python -m pip download -q --no-deps --no-binary :all: --no-build-isolation \
      --dest "$source" horovod==0.28.1 &&
    tar -xf "$source"/horovod-0.28.1.tar.gz -C "$source" --strip-components 1 &&
    sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' \
      "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt" &&
    PATH="$PWD/.venv/bin:$PATH" MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" \
      HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
      HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
      .venv/bin/python -m pip install -q --no-deps --no-build-isolation \
      --target "$PEERS/horovod" "$source" &&
    .venv/bin/python -m pip install -q --target "$PEERS/horovod" \
      cloudpickle psutil pyyaml packaging &&
    rm -rf "$source"
)

# CNTK was linked against an Open MPI whose libraries had another version number.
cntk() {
  local python="${PYTHON36:-python3.6}" packages="$PEERS/cntk/packages" root="$PEERS/cntk/openmpi"
  "$python" --version >/dev/null 2>&1 || { report "CNTK needs a Python 3.6."; return 1; }
  mkdir -p "$packages/partial" "$root" "$PEERS/cntk/links"
  "$python" -m venv "$PEERS/cntk/venv" && "$PEERS/cntk/venv/bin/pip" install -q cntk==2.7 &&
    apt-get install -qq -y --no-install-recommends --download-only --reinstall \
      -o Dir::Cache::archives="$packages" openmpi-bin libopenmpi3 >/dev/null || return 1
  for package in "$packages"/*.deb; do dpkg -x "$package" "$root" || return 1; done
  local libraries="$root/usr/lib/$(uname -m)-linux-gnu"
  ln -sf "$libraries/libmpi.so.40" "$PEERS/cntk/links/libmpi.so.12"
  ln -sf "$libraries/libmpi_cxx.so.40" "$PEERS/cntk/links/libmpi_cxx.so.1"
  local own="$PEERS/cntk/venv/lib/python3.6/site-packages/cntk/libs"
  # `run COMMAND ...` runs a command with this MPI, here and on the hosts of the launcher.
  {
    echo '#!/bin/sh'
    echo "export OPAL_PREFIX='$root/usr' OMPI_MCA_mca_base_component_show_load_errors=0"
    echo "export LD_LIBRARY_PATH='$PEERS/cntk/links:$libraries:$own'"
    echo "export PATH='$PEERS/cntk/venv/bin:$root/usr/bin':\"\$PATH\""
    echo 'exec "$@"'
  } >"$PEERS/cntk/run"
  { echo '#!/bin/sh'; echo "exec '$PEERS/cntk/run' orted \"\$@\""; } >"$PEERS/cntk/orted"
  chmod +x "$PEERS/cntk/run" "$PEERS/cntk/orted"
}

mkdir -p "$PEERS"
failed=0
[ "$#" -gt 0 ] || set -- torchft horovod cntk
for peer in "$@"; do
  case "$peer" in
    torchft | horovod | cntk) ;;
    *) report "unknown peer $peer: use torchft, horovod or cntk"; exit 2 ;;
  esac
  if "$peer"; then report "installed $peer"; else report "could not install $peer"; failed=1; fi
done
exit "$failed"
