//! TLS of a connection.
//!
//! `sslmode=require` verifies the certificate and the name of the server, as the stricter modes do.
//! A connection that only prefers TLS is protected from nothing, so that TLS is used if the URL
//! requires it, and not otherwise.

use super::error::PostgresConnectError;
use crate::store::remote::tls::TlsSettings;

#[cfg(feature = "postgres-tls")]
pub(super) type Tls = tokio_postgres_rustls::MakeRustlsConnect;
#[cfg(not(feature = "postgres-tls"))]
pub(super) type Tls = tokio_postgres::NoTls;

/// The TLS of an address. `None`: its URL requires none.
pub(super) fn tls(settings: Option<&TlsSettings>) -> Result<Tls, PostgresConnectError> {
    #[cfg(feature = "postgres-tls")]
    return Ok(Tls::new(TlsSettings::config(settings).map_err(PostgresConnectError::InvalidTls)?));
    #[cfg(not(feature = "postgres-tls"))]
    return if settings.is_some() { Err(PostgresConnectError::TlsNotEnabled) } else { Ok(tokio_postgres::NoTls) };
}
