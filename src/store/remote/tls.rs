//! Which certificates a connection with TLS trusts, and which one it shows to the server.
//!
//! The certificate and the name of the server are always verified: a server in between could grant
//! locks. Without settings, the trusted roots are those of the system, or of the file that
//! `SSL_CERT_FILE` names.

#![cfg_attr(not(feature = "__tls"), allow(dead_code, reason = "there is no TLS"))]

use std::fmt;

#[cfg(feature = "__tls")]
use {
    rustls::{
        ClientConfig, RootCertStore,
        crypto::{CryptoProvider, ring},
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
    std::{fs, sync::Arc},
};

/// The settings of a builder, or those of a URL: the trusted roots, the certificate of this client
/// with those between it and its root, and its key.
#[derive(Clone, Debug, Default)]
pub(crate) struct TlsSettings([Option<Pem>; 3]);

/// Certificates or a key.
#[derive(Clone)]
struct Pem {
    /// The parameter or the method that has set it.
    setting: &'static str,
    source: Source,
}

#[derive(Clone)]
enum Source {
    File(String),
    Text(Vec<u8>),
}

impl TlsSettings {
    /// The settings of a URL, whose parameters are paths.
    pub(crate) fn from_url(mut parameter: impl FnMut(&str) -> Option<String>) -> Self {
        let file = |setting| parameter(setting).map(|path| Pem { setting, source: Source::File(path) });
        Self(["sslrootcert", "sslcert", "sslkey"].map(file))
    }

    /// With these roots in place of those of the system.
    pub(crate) fn with_roots(self, pem: Vec<u8>) -> Self {
        let Self([_, certificate, key]) = self;
        Self([Some(Pem { setting: "tls_roots", source: Source::Text(pem) }), certificate, key])
    }

    /// With this certificate, and those between it and its root, and its key.
    pub(crate) fn with_client_certificate(self, certificate: Vec<u8>, key: Vec<u8>) -> Self {
        let pem = |text| Some(Pem { setting: "tls_client_certificate", source: Source::Text(text) });
        let Self([roots, ..]) = self;
        Self([roots, pem(certificate), pem(key)])
    }

    /// The settings of a builder and of a URL together. `None`: the URL requires no TLS, as it does
    /// with `required_by`.
    ///
    /// A setting that is ignored could send a password to a server that is not the right one.
    pub(crate) fn of_connection(
        builder: &Self,
        url: Self,
        is_required: bool,
        required_by: &str,
    ) -> Result<Option<Self>, String> {
        let mut all = builder.clone();
        for (one, other) in all.0.iter_mut().zip(url.0) {
            if let (Some(one), Some(other)) = (&one, &other) {
                return Err(format!("both {one} and {other} are set: remove one"));
            }
            *one = one.take().or(other);
        }
        match all.0.iter().flatten().next() {
            Some(Pem { setting, .. }) if !is_required => {
                Err(format!("`{setting}` needs a URL with TLS: {required_by}"))
            }
            _ => Ok(is_required.then_some(all)),
        }
    }

    /// Reads the files. An error names the setting and the file. `None`: no server is trusted.
    #[cfg(feature = "__tls")]
    pub(crate) fn config(settings: Option<&Self>) -> Result<ClientConfig, String> {
        // The provider that the process has installed: rustls panics if the features of two crates
        // enable different ones.
        let provider = CryptoProvider::get_default().cloned().unwrap_or_else(|| Arc::new(ring::default_provider()));
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("the crypto provider of the process has no TLS 1.2 and 1.3: {error}"))?;
        let Some(Self([roots, certificate, key])) = settings else {
            return Ok(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth());
        };
        let builder = builder.with_root_certificates(trusted(roots.as_ref())?);
        match (certificate, key) {
            (None, None) => Ok(builder.with_no_client_auth()),
            (Some(certificate), Some(key)) => {
                let (chain, keys) = (certificate.read("certificate")?, key.read("unencrypted private key")?);
                let [private] =
                    <[PrivateKeyDer<'_>; 1]>::try_from(keys).map_err(|_| key.defect("has several private keys"))?;
                builder.with_client_auth_cert(chain, private).map_err(|error| {
                    key.defect(&format!("has no key that can be used with the certificate of {certificate}: {error}"))
                })
            }
            (Some(pem), None) | (None, Some(pem)) => {
                Err(pem.defect("is set alone: a certificate (`sslcert`) and its key (`sslkey`) need each other"))
            }
        }
    }
    /// The trusted roots, and the certificate of this client and its key, if there are, as bytes in
    /// PEM or DER, for a driver that makes its own configuration.
    #[cfg(feature = "mysql-tls")]
    pub(crate) fn bytes(&self) -> Result<[Vec<Vec<u8>>; 2], String> {
        let Self([roots, client @ ..]) = self;
        let roots = match roots {
            Some(roots) => vec![roots.text()?],
            None => rustls_native_certs::load_native_certs().certs.iter().map(|root| root.to_vec()).collect(),
        };
        let client = client.iter().flatten().map(Pem::text).collect::<Result<_, _>>()?;
        // The driver takes the provider of the process: without one, it panics if the features of
        // two crates enable different ones.
        if CryptoProvider::get_default().is_none() {
            let _ = ring::default_provider().install_default();
        }
        Ok([roots, client])
    }
}

/// The certificates that a chain may end with. `None`: those of the system.
#[cfg(feature = "__tls")]
fn trusted(roots: Option<&Pem>) -> Result<RootCertStore, String> {
    let mut trusted = RootCertStore::empty();
    if let Some(roots) = roots {
        for certificate in roots.read::<CertificateDer<'_>>("certificate")? {
            trusted.add(certificate).map_err(|error| roots.defect(&format!("has an invalid root: {error}")))?;
        }
        return Ok(trusted);
    }
    // A system has certificates that cannot be read beside others that can.
    match trusted.add_parsable_certificates(rustls_native_certs::load_native_certs().certs) {
        (0, _) => Err("the system has no trusted roots: install `ca-certificates`, or set `sslrootcert`".to_owned()),
        _ => Ok(trusted),
    }
}

/// A hint for an error of TLS, by the text of rustls.
pub(crate) fn hint(error: &str) -> Option<&'static str> {
    let mentions = |texts: &[&str]| texts.iter().any(|part| error.contains(part));
    Some(if mentions(&["received fatal alert"]) {
        "does the server require a certificate of its clients? `sslcert` and `sslkey` of the URL name one that its roots trust"
    } else if mentions(&["NotValidForName", "not valid for name"]) {
        "the certificate is for another host name: connect by a name that it has, or issue it for this one"
    } else if mentions(&["Expired", "expired"]) {
        "the certificate has expired, or the clock of this machine is wrong: renew it"
    } else if mentions(&["NotValidYet", "not valid yet"]) {
        "the certificate is not valid yet, or the clock of this machine is wrong"
    } else if mentions(&["certificate"]) {
        "does this system trust the issuer of the certificate? `sslrootcert` of the URL, or `SSL_CERT_FILE`, names other roots"
    } else {
        return None;
    })
}

impl Pem {
    /// All items of this kind, at least one.
    #[cfg(feature = "__tls")]
    fn read<T: PemObject>(&self, kind: &str) -> Result<Vec<T>, String> {
        let items: Vec<_> = T::pem_slice_iter(&self.text()?)
            .collect::<Result<_, _>>()
            .map_err(|error| self.defect(&format!("is not PEM: {error}")))?;
        if items.is_empty() { Err(self.defect(&format!("has no {kind} in PEM"))) } else { Ok(items) }
    }

    #[cfg(feature = "__tls")]
    fn text(&self) -> Result<Vec<u8>, String> {
        match &self.source {
            Source::File(path) => fs::read(path).map_err(|error| self.defect(&format!("cannot be read: {error}"))),
            Source::Text(text) => Ok(text.clone()),
        }
    }

    fn defect(&self, defect: &str) -> String {
        format!("{self} {defect}")
    }
}

impl fmt::Display for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::File(path) => write!(f, "the file {path:?} of `{}`", self.setting),
            Source::Text(_) => write!(f, "the text of `{}`", self.setting),
        }
    }
}

impl fmt::Debug for Pem {
    /// Without the text, which may be a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(all(test, feature = "__tls"))]
mod tests {
    use super::*;

    const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    const KEY: &str = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";

    #[test]
    fn defect_names_the_setting_and_the_file() {
        let none = "/none/s\n.pem";
        let of_url = |names: &'static [&str]| {
            let file = |name: &str| names.contains(&name).then(|| none.to_owned());
            TlsSettings::from_url(file)
        };
        let of_client = |certificate: &str, key: &str| {
            TlsSettings::default().with_client_certificate(certificate.into(), key.into())
        };
        for (settings, defect) in [
            (of_url(&["sslrootcert"]), "the file \"/none/s\\n.pem\" of `sslrootcert` cannot be read: No such file"),
            (of_url(&["sslkey"]), "the file \"/none/s\\n.pem\" of `sslkey` is set alone: "),
            (of_url(&["sslcert", "sslkey"]), "the file \"/none/s\\n.pem\" of `sslcert` cannot be read: No such file"),
            (TlsSettings::default().with_roots(KEY.into()), "the text of `tls_roots` has no certificate in PEM"),
            (TlsSettings::default().with_roots(CERTIFICATE.into()), "the text of `tls_roots` has an invalid root: "),
            (TlsSettings::default().with_roots(CERTIFICATE[..35].into()), "the text of `tls_roots` is not PEM: "),
            (of_client("", KEY), "the text of `tls_client_certificate` has no certificate in PEM"),
            (
                of_client(CERTIFICATE, &KEY.replace("PRIVATE", "ENCRYPTED PRIVATE")),
                "the text of `tls_client_certificate` has no unencrypted private key in PEM",
            ),
            (of_client(CERTIFICATE, &KEY.repeat(2)), "the text of `tls_client_certificate` has several private keys"),
            (of_client(CERTIFICATE, KEY), "the text of `tls_client_certificate` has no key that can be used with"),
        ] {
            let error = TlsSettings::config(Some(&settings)).expect_err(defect);
            assert!(error.starts_with(defect) && !error.contains("AAAA"), "{error}");
        }
    }

    #[test]
    fn debug_of_settings_has_no_key() {
        let settings = TlsSettings::default().with_client_certificate(CERTIFICATE.into(), KEY.into());
        let text = format!("{settings:?}");
        assert!(text.contains("`tls_client_certificate`") && !text.contains("AAAA") && !text.contains("65"), "{text}");
    }
}
