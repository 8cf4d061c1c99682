use std::future::Future;

use http::request::Parts;

use crate::{
    body::reader::BodyReader,
    key_source::{KeyRejection, KeySource},
    replay::fingerprint::Fingerprint,
};

/// Source of the fingerprint of a request, by which its retries are recognized.
///
/// The trait cannot be implemented outside of this crate.
pub trait FingerprintSource: Clone + Send + Sync + 'static {
    #[doc(hidden)]
    fn fingerprint(
        &self,
        head: &mut Parts,
        body: &mut BodyReader<'_>,
    ) -> impl Future<Output = Result<Fingerprint, KeyRejection>> + Send;
}

/// Fingerprint of method, path, query, media type and body, byte for byte. The default of a
/// [`ReplayLayer`](crate::ReplayLayer).
#[derive(Clone, Copy, Debug, Default)]
pub struct WholeRequest(());

/// Fingerprint of method, path and the values of a key source. Created by
/// [`ReplayLayer::fingerprint`](crate::ReplayLayer::fingerprint).
#[derive(Clone, Debug)]
pub struct KeyValues<K>(pub(super) K);

impl FingerprintSource for WholeRequest {
    async fn fingerprint(&self, head: &mut Parts, body: &mut BodyReader<'_>) -> Result<Fingerprint, KeyRejection> {
        let body = body.read(head).await?;
        Ok(Fingerprint::of_request(head, &body))
    }
}

impl<K: KeySource> FingerprintSource for KeyValues<K> {
    async fn fingerprint(&self, head: &mut Parts, body: &mut BodyReader<'_>) -> Result<Fingerprint, KeyRejection> {
        match self.0.extract_key(head, body).await? {
            Some(values) => Ok(Fingerprint::of_values(head, &values)),
            None => WholeRequest(()).fingerprint(head, body).await,
        }
    }
}
