#!/usr/bin/env bash
# etcd for the tests, not installed: Debian's etcd-server, unpacked under .cache/etcd. The last line says where the program is.
# MARU_ETCD names another one; an etcd on the PATH is taken as it is. Repeatable; nothing is fetched twice.
. "$(dirname "$0")/common.sh"

works() { [ -x "$1" ] && "$1" --version >/dev/null 2>&1; }

if [ -n "${MARU_ETCD:-}" ]; then
  works "$MARU_ETCD" || die "MARU_ETCD is $MARU_ETCD, which is no etcd that runs here: name one, or unset it"
  echo "$MARU_ETCD"
  exit 0
fi
if command -v etcd >/dev/null 2>&1; then
  command -v etcd
  exit 0
fi

CACHE="$ROOT/.cache/etcd"
lock_environment "$CACHE"
if works "$CACHE/usr/bin/etcd"; then
  echo "$CACHE/usr/bin/etcd"
  exit 0
fi
command -v apt-get >/dev/null && command -v dpkg >/dev/null \
  || die "this is not Debian: install etcd (3.4 or later) and name it in MARU_ETCD"
say "fetching Debian's etcd-server into $CACHE"
FRESH="$(mktemp -d "$CACHE.XXXXXX")"
trap 'rm -rf "$FRESH"' EXIT
download() { (cd "$FRESH" && apt-get download -q etcd-server) >"$FRESH/log" 2>&1; }
if ! download; then
  # The lists of packages are missing or old.
  sudo=""
  [ "$(id -u)" = 0 ] || sudo="sudo -n"
  $sudo apt-get update -q >"$FRESH/log" 2>&1 || true
  download || die "etcd-server cannot be had: $(tail -n 1 "$FRESH/log")"
fi
dpkg -x "$FRESH"/etcd-server_*.deb "$FRESH/root"
works "$FRESH/root/usr/bin/etcd" || die "the etcd of Debian's etcd-server does not run here: name another in MARU_ETCD"
rm -rf "$CACHE"
mv "$FRESH/root" "$CACHE"
echo "$CACHE/usr/bin/etcd"
