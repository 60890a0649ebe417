#!/usr/bin/env bash
# Install into .peers the systems that `make bench-exchange` compares torchmn with, besides torch:
# torchft; Horovod, which is compiled for some minutes and needs cmake, make and g++; and CNTK
# 2.7, which needs a Python 3.6 (PYTHON36=...) and the Open MPI 4 of Debian or Ubuntu.
# For `make bench-lm`: torchft.
# For `make bench-reading`: CNTK, its image libraries (cntk-images, which needs cmake, make, nasm, gcc
# and a deb-src line in apt's sources), and WebDataset and decoders of JPEG (readers).
# Nothing is installed outside of .peers, and no benchmark requires it.
#
#     setup_peers.sh [torchft] [horovod] [cntk] [cntk-images] [readers]     # all of them by default
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

# CNTK's reader of images was linked against libjpeg with the interface of version 8, which Debian
# does not have, and against old libraries of other formats. JPEG is compiled; for the others there
# are libraries with the few functions that are called when no such file is read.
cntk_images() {
  local tool source="$PEERS/libjpeg-source" links="$PEERS/cntk/links"
  for tool in cmake make nasm gcc; do
    command -v "$tool" >/dev/null || { report "CNTK's images need $tool: apt-get install $tool"; return 1; }
  done
  rm -rf "$source" && mkdir -p "$source" "$links" || return 1
  (cd "$source" && apt-get source -qq --download-only libjpeg-turbo >/dev/null &&
    tar -xf libjpeg-turbo_*.orig.tar.gz --strip-components 1 &&
    cmake -S . -B build -DWITH_JPEG8=1 -DENABLE_STATIC=0 -DWITH_TURBOJPEG=0 -DREQUIRE_SIMD=1 \
      -DCMAKE_BUILD_TYPE=Release >/dev/null && make -s -C build jpeg >/dev/null) || return 1
  cp -a "$source"/build/libjpeg.so.8* "$links" && rm -rf "$source" &&
    stub libtiff.so.5 LIBTIFF_4.0 TIFFSetErrorHandler TIFFSetWarningHandler &&
    stub libpng12.so.0 PNG12_0 unused && stub libjasper.so.1 '' jas_init jas_cleanup
}

# stub LIBRARY VERSION FUNCTION...: a library whose functions return 0.
stub() {
  local library="$1" version="$2" name options=()
  shift 2
  if [ -n "$version" ]; then
    echo "$version { global: *; };" >"$PEERS/cntk/links/$library.map"
    options=("-Wl,--version-script=$PEERS/cntk/links/$library.map")
  fi
  for name in "$@"; do echo "void *$name(void) { return 0; }"; done |
    gcc -shared -x c - -o "$PEERS/cntk/links/$library" "-Wl,-soname,$library" "${options[@]}"
}

readers() {
  .venv/bin/python -m pip install -q --target "$PEERS/readers" --no-deps --upgrade \
    webdataset braceexpand simplejpeg kornia-rs
}

mkdir -p "$PEERS"
failed=0
[ "$#" -gt 0 ] || set -- torchft horovod cntk cntk-images readers
for peer in "$@"; do
  case "$peer" in
    torchft | horovod | cntk | cntk-images | readers) ;;
    *) report "unknown peer $peer: use torchft, horovod, cntk, cntk-images or readers"; exit 2 ;;
  esac
  if "${peer//-/_}"; then report "installed $peer"; else report "could not install $peer"; failed=1; fi
done
exit "$failed"
