//! TLS of a connection.
//!
//! The driver makes its own configuration. Its options get what the common settings say: the
//! trusted roots, in place of those of the driver, and the certificate of this client.

use mysql_async::OptsBuilder;

use crate::store::remote::tls::TlsSettings;

/// The options with the TLS of an address. `None`: its URL requires none.
#[cfg(feature = "mysql-tls")]
pub(super) fn with_tls(options: OptsBuilder, settings: Option<&TlsSettings>) -> Result<OptsBuilder, String> {
    let Some(settings) = settings else { return Ok(options) };
    // Whether each file can be used.
    TlsSettings::config(Some(settings))?;
    let [roots, client] = settings.bytes()?;
    let client = <[Vec<u8>; 2]>::try_from(client).ok();
    let client = client.map(|[certificate, key]| mysql_async::ClientIdentity::new(certificate.into(), key.into()));
    let tls = mysql_async::SslOpts::default()
        .with_disable_built_in_roots(true)
        .with_root_certs(roots.into_iter().map(Into::into).collect())
        .with_client_identity(client);
    Ok(options.ssl_opts(tls))
}

#[cfg(not(feature = "mysql-tls"))]
pub(super) fn with_tls(options: OptsBuilder, settings: Option<&TlsSettings>) -> Result<OptsBuilder, String> {
    let missing = "`sslmode` requires TLS, and tower-lock was built without it: add its feature `mysql-tls`";
    if settings.is_some() { Err(missing.to_owned()) } else { Ok(options) }
}
