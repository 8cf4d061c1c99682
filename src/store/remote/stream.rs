//! The bytes to and from a server, with TLS or without.

use std::io;

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};

use super::tls::TlsSettings;

/// The bytes to and from a server.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// Adds TLS to a connection.
#[cfg(feature = "__tls_stream")]
pub(crate) type Tls = tokio_rustls::TlsConnector;
#[cfg(not(feature = "__tls_stream"))]
pub(crate) type Tls = std::convert::Infallible;

/// The TLS of these settings, or their defect. `None`: the crate was built without TLS.
#[cfg(feature = "__tls_stream")]
pub(crate) fn tls(settings: &TlsSettings) -> Option<Result<Tls, String>> {
    Some(TlsSettings::config(Some(settings)).map(|config| std::sync::Arc::new(config).into()))
}

#[cfg(not(feature = "__tls_stream"))]
pub(crate) fn tls(_: &TlsSettings) -> Option<Result<Tls, String>> {
    None
}

/// Connects to a server. The certificate must be for this host.
pub(crate) async fn open(host: &str, port: u16, tls: Option<&Tls>) -> io::Result<Box<dyn Stream>> {
    let stream = TcpStream::connect((host, port)).await?;
    // Nagle's algorithm would let a call wait for the reply to the previous one.
    stream.set_nodelay(true)?;
    match tls {
        None => Ok(Box::new(stream)),
        #[cfg(feature = "__tls_stream")]
        Some(tls) => {
            let name =
                host.to_owned().try_into().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
            Ok(Box::new(tls.connect(name, stream).await?))
        }
        #[cfg(not(feature = "__tls_stream"))]
        Some(tls) => match *tls {},
    }
}
