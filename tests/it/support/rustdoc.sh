#!/bin/sh
# rustdoc with its JSON, which is not stable. It alone is told so: with this in the environment of cargo, half of all dependencies
# would be built anew.
RUSTC_BOOTSTRAP=1 exec rustdoc "$@"
