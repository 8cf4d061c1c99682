#!/bin/sh
# rustdoc with unstable options, for JSON output on a stable toolchain. Only rustdoc gets the
# variable: cargo would rebuild the dependencies for it.
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
