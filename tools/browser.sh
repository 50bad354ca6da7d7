#!/usr/bin/env bash
# The headless browser of the live page's test: Debian's chromium with its driver. Prints nothing if both are there already.
# Repeatable; as root or with sudo it installs them, without either it says what to install.
. "$(dirname "$0")/common.sh"

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
  exit 0
fi
command -v apt-get >/dev/null || die "no chromium and no chromedriver: install them with this system's package manager"
SUDO=""
if [ "$(id -u)" != 0 ]; then
  command -v sudo >/dev/null || die "no chromium: apt-get install chromium chromium-driver"
  SUDO=sudo
fi
say "installing chromium and its driver"
install() {
  DEBIAN_FRONTEND=noninteractive $SUDO apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends \
    chromium chromium-driver >/dev/null
}
install || { $SUDO apt-get update -q && install; } || die "chromium could not be installed"
