#!/usr/bin/env bash
# `make docs`: the documentation as a site in site/ (or the directory that is named). A warning is an error: a page that is in no
# menu, a link that leads nowhere. MkDocs has an environment of its own, `.venv-docs` or MARU_DOCS_ENV.
. "$(dirname "$0")/common.sh"
cd "$ROOT"

# numpy and msgspec: tables are made of the code.
PACKAGES=(mkdocs==1.6.1 mkdocs-material==9.8.2 'numpy>=1.26' 'msgspec>=0.19')
VENV="${MARU_DOCS_ENV:-$ROOT/.venv-docs}"
SITE="$(realpath -m "${1:-$ROOT/site}")"

lock_environment "$VENV"
STAMP="$(hash_of tools/docs.sh tools/common.sh)"
if ! up_to_date "$VENV" "$STAMP"; then
  say "building $VENV"
  new_environment "$VENV" "$(find_python)"
  "$VENV/bin/python" -m pip install -q --disable-pip-version-check "${PACKAGES[@]}"
  echo "$STAMP" >"$VENV/.maru-stamp"
fi
# The theme's makers say there what they think of the next MkDocs.
NO_MKDOCS_2_WARNING=1 "$VENV/bin/python" -m mkdocs build --strict --site-dir "$SITE"
say "built $SITE/index.html"
