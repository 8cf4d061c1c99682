//! TLS of a connection.
//!
//! The certificate and the name of the server are always checked, also with `sslmode=require`: a
//! server in between could grant locks. A connection that only prefers TLS is protected from
//! nothing, so that TLS is used if the URL requires it, and not otherwise.

#[cfg(not(feature = "postgres-tls"))]
use tokio_postgres::NoTls;
#[cfg(feature = "postgres-tls")]
use {
    rustls::{
        ClientConfig, RootCertStore,
        crypto::{CryptoProvider, ring},
        pki_types::{CertificateDer, pem::PemObject},
    },
    std::{error::Error, sync::Arc},
    tokio_postgres_rustls::MakeRustlsConnect,
};

use super::error::PostgresConnectError;

/// The roots that the certificate of the server must lead to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Roots {
    /// Those of the system, or of the file that `SSL_CERT_FILE` names.
    System,
    /// Those of this file.
    File(String),
}

#[cfg(feature = "postgres-tls")]
pub(super) type Tls = MakeRustlsConnect;
#[cfg(not(feature = "postgres-tls"))]
pub(super) type Tls = NoTls;

/// The TLS of a URL. `None`: it requires none.
#[cfg(not(feature = "postgres-tls"))]
pub(super) fn tls(roots: Option<&Roots>) -> Result<Tls, PostgresConnectError> {
    if roots.is_some() { Err(PostgresConnectError::TlsNotEnabled) } else { Ok(NoTls) }
}

/// The TLS of a URL. `None`: it requires none.
#[cfg(feature = "postgres-tls")]
pub(super) fn tls(roots: Option<&Roots>) -> Result<Tls, PostgresConnectError> {
    let trusted = roots.map_or_else(|| Ok(RootCertStore::empty()), read).map_err(PostgresConnectError::NoRoots)?;
    // The provider that the process has installed: rustls panics if the features of two crates
    // enable different ones.
    let provider = CryptoProvider::get_default().cloned().unwrap_or_else(|| Arc::new(ring::default_provider()));
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| PostgresConnectError::NoRoots(error.into()))?
        .with_root_certificates(trusted)
        .with_no_client_auth();
    Ok(MakeRustlsConnect::new(config))
}

#[cfg(feature = "postgres-tls")]
fn read(roots: &Roots) -> Result<RootCertStore, Box<dyn Error + Send + Sync>> {
    let certificates = match roots {
        Roots::File(path) => CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>()?,
        // A system has certificates that cannot be read beside others that can.
        Roots::System => rustls_native_certs::load_native_certs().certs,
    };
    let mut store = RootCertStore::empty();
    let (added, _) = store.add_parsable_certificates(certificates);
    if added == 0 { Err("it has no certificate".into()) } else { Ok(store) }
}
