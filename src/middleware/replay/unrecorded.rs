/// Why a request passed its replay layer without a record. It is in the extensions of the request,
/// for the error of [`Once`](crate::Once) as an extractor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unrecorded {
    /// Its method has no keys at this layer.
    Method,
    /// It has no key, and the layer does not require one.
    NoKey,
    /// The scope of the layer returned `None`.
    NoScope,
}
