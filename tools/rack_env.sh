#!/usr/bin/env bash
# What tests/rack boots: Debian's kernel and busybox unpacked under .rack/ (MARU_RACK names another place), QEMU installed where it is
# missing, and the provider of soft-RoCE made to fit NIXL in .venv. The last line is the folder. Repeatable; nothing is fetched twice.
. "$(dirname "$0")/common.sh"

RACK="${MARU_RACK:-$ROOT/.rack}"
VENV="${MARU_VENV:-$ROOT/.venv}"
lock_environment "$RACK/image"

SUDO=""
[ "$(id -u)" = 0 ] || SUDO="sudo -n"
FRESH=""
trap '[ -z "$FRESH" ] || rm -rf "$FRESH"' EXIT
LISTS=""

[ "$(uname -m)" = x86_64 ] || die "no rack: guests are x86_64, and this machine is $(uname -m)"
refresh_lists() { [ -n "$LISTS" ] || { LISTS=done; $SUDO apt-get update -q >/dev/null 2>&1 || true; }; }

# program_of PACKAGE PROGRAM
install_if_missing() {
  ! command -v "$2" >/dev/null || return 0
  command -v apt-get >/dev/null || die "no rack: there is no $2, and no apt-get to install $1"
  [ -z "$SUDO" ] || sudo -n true 2>/dev/null || die "no rack: there is no $2: apt-get install $1 (needs root)"
  say "installing $1"
  refresh_lists
  DEBIAN_FRONTEND=noninteractive $SUDO apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "$1" >/dev/null \
    || die "no rack: $1 could not be installed"
}
install_if_missing qemu-system-x86 qemu-system-x86_64
install_if_missing iproute2 rdma

# unpacked PACKAGE FOLDER: downloaded, not installed.
unpacked() {
  (cd "$FRESH" && apt-get download -q "$1") >"$FRESH/log" 2>&1 || { refresh_lists; (cd "$FRESH" && apt-get download -q "$1") >"$FRESH/log" 2>&1; } \
    || die "no rack: $1 cannot be had: $(tail -n 1 "$FRESH/log")"
  dpkg -x "$FRESH/$1"_*.deb "$FRESH/$2"
}

fresh_folder() {
  [ -z "$FRESH" ] || return 0
  command -v apt-get >/dev/null && command -v dpkg >/dev/null || die "no rack: this is not Debian, whose kernel it boots"
  FRESH="$(mktemp -d "$RACK/fresh.XXXXXX")"
  chmod 755 "$FRESH" # apt's own user writes there
}

# The image: a kernel and what is loaded before a guest has its root.
STAMP="$(hash_of tools/rack_env.sh tools/rack_image.py)"
if [ "$(cat "$RACK/image/stamp" 2>/dev/null)" != "$STAMP" ]; then
  fresh_folder
  say "fetching a kernel for guests into $RACK (about 75 MB)"
  refresh_lists
  KERNEL="$(apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: \(linux-image-[0-9].*\)/\1/p' | head -n 1)"
  [ -n "$KERNEL" ] || die "no rack: apt knows no linux-image-amd64: this is not Debian, whose kernel it boots"
  unpacked "$KERNEL" kernel
  unpacked busybox-static busybox
  mkdir "$FRESH/image"
  "$VENV/bin/python" "$ROOT/tools/rack_image.py" "$FRESH/kernel" "$FRESH/busybox/bin/busybox" "$FRESH/image" \
    || die "no rack: $KERNEL cannot be made an image of a guest"
  echo "$STAMP" >"$FRESH/image/stamp"
  rm -rf "$RACK/image"
  mv "$FRESH/image" "$RACK/image"
fi

# The provider: NIXL's wheel carries a libibverbs of its own, under a name of its own, and no providers.
VERBS="$(cd "$VENV" && ls lib/python3*/site-packages/nixl_*.libs/libibverbs-*.so* 2>/dev/null | head -n 1)"
[ -n "$VERBS" ] || die "no rack: there is no NIXL in $VENV (tools/dev_env.sh)"
STAMP="$(hash_of tools/rack_env.sh)-$(basename "$VERBS")"
if [ "$(cat "$RACK/verbs/stamp" 2>/dev/null)" != "$STAMP" ]; then
  fresh_folder
  unpacked ibverbs-providers providers
  unpacked patchelf patchelf
  PROVIDER="$(find "$FRESH/providers" -name 'librxe-rdmav*.so' | head -n 1)"
  mkdir "$FRESH/verbs"
  cp "$PROVIDER" "$FRESH/verbs/"
  "$FRESH/patchelf/usr/bin/patchelf" --replace-needed libibverbs.so.1 "$(basename "$VERBS")" "$FRESH/verbs/$(basename "$PROVIDER")" \
    || die "no rack: the provider of soft-RoCE cannot be changed"
  echo "$STAMP" >"$FRESH/verbs/stamp"
  rm -rf "$RACK/verbs"
  mv "$FRESH/verbs" "$RACK/verbs"
fi
echo "$RACK"
