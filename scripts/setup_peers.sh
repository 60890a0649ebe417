#!/usr/bin/env bash
# Make .peers with what `make bench-exchange` measures us beside and torch does not hold: torchft,
# and CNTK 2.7, which needs a Python 3.6 (PYTHON36=...) and the Open MPI 4 of Debian or Ubuntu.
# Nothing of it is installed outside of .peers, and no benchmark needs it.
set -u
cd "$(dirname "$0")/.." || exit 1
readonly PEERS="$PWD/.peers"

say() { echo "setup_peers: $1"; }

torchft() {
  .venv/bin/python -m pip install -q --target "$PEERS/torchft" --no-deps torchft-nightly &&
    .venv/bin/python -m pip install -q --target "$PEERS/torchft" \
      opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
}

# CNTK was linked against an Open MPI whose library had another number.
cntk() {
  local python="${PYTHON36:-python3.6}" packages="$PEERS/cntk/packages" root="$PEERS/cntk/openmpi"
  "$python" --version >/dev/null 2>&1 || { say "CNTK needs a Python 3.6."; return 1; }
  mkdir -p "$packages/partial" "$root" "$PEERS/cntk/links"
  "$python" -m venv "$PEERS/cntk/venv" && "$PEERS/cntk/venv/bin/pip" install -q cntk==2.7 &&
    apt-get install -qq -y --no-install-recommends --download-only \
      -o Dir::Cache::archives="$packages" openmpi-bin libopenmpi3 >/dev/null || return 1
  for package in "$packages"/*.deb; do dpkg -x "$package" "$root" || return 1; done
  local libraries="$root/usr/lib/$(uname -m)-linux-gnu"
  ln -sf "$libraries/libmpi.so.40" "$PEERS/cntk/links/libmpi.so.12"
  ln -sf "$libraries/libmpi_cxx.so.40" "$PEERS/cntk/links/libmpi_cxx.so.1"
  local own="$PEERS/cntk/venv/lib/python3.6/site-packages/cntk/libs"
  # `run COMMAND ...`: with this MPI, here and on hosts that the launcher reaches.
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
for peer in torchft cntk; do
  if "$peer"; then say "$peer is there"; else say "$peer could not be had"; failed=1; fi
done
exit "$failed"
