#!/usr/bin/env bash
# The environment `.venv-peers` (or MARU_PEERS_ENV) with what `maru-bench peers` compares Maru with: Mooncake Store and NIXL,
# without a CUDA runtime, and the system libraries that they want, unpacked beside them and not installed. Repeatable.
# Prints the Python to use as its last line of output.
. "$(dirname "$0")/common.sh"

PACKAGES=(mooncake-transfer-engine-non-cuda==0.3.13.post1 'numpy>=1.26' 'msgspec>=0.19' 'pyzmq>=26')
# Their own dependencies are gigabytes of CUDA, of which the POSIX plugin needs nothing.
BARE=(nixl==1.5.1 nixl-cu13==1.5.1)
LIBRARIES=(libibverbs1 ibverbs-providers libnl-3-200 libnl-route-3-200 libnuma1)
PIP=(-m pip install -q --disable-pip-version-check)

VENV="${MARU_PEERS_ENV:-$ROOT/.venv-peers}"
lock_environment "$VENV"
STAMP="$(hash_of tools/peers_env.sh tools/common.sh)"
if up_to_date "$VENV" "$STAMP"; then
  echo "$VENV/bin/python"
  exit 0
fi
say "building $VENV"
new_environment "$VENV" "$(find_python)"
V="$VENV/bin/python"
"$V" "${PIP[@]}" "${PACKAGES[@]}"
"$V" "${PIP[@]}" --no-deps "${BARE[@]}"

if command -v apt-get >/dev/null && command -v dpkg >/dev/null; then
  FRESH="$(mktemp -d)"
  trap 'rm -rf "$FRESH"' EXIT
  download() { (cd "$FRESH" && apt-get download -q "${LIBRARIES[@]}") >"$FRESH/log" 2>&1; }
  if ! download; then
    # The lists of packages are missing or old.
    sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    $sudo apt-get update -q >"$FRESH/log" 2>&1 || true
    download || say "no Debian packages to be had ($(tail -n 1 "$FRESH/log")): Mooncake needs libibverbs1 of this system"
  fi
  rm -rf "$VENV/system"
  for package in "$FRESH"/*.deb; do
    [ ! -e "$package" ] || dpkg -x "$package" "$VENV/system"
  done
fi
SYSTEM="$VENV/system/usr/lib/x86_64-linux-gnu:$VENV/system/lib/x86_64-linux-gnu"
LD_LIBRARY_PATH="$SYSTEM${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$V" -c 'import mooncake.store, nixl._api' \
  || say "not every peer can be imported: see above; the others can be compared"
echo "$STAMP" >"$VENV/.maru-stamp"
echo "$V"
