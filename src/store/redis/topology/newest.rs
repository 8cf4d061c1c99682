//! Which of several servers knows the newest configuration.

use std::time::Duration;

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::time::timeout;

/// How long to wait for the servers beyond a majority of those that are asked. In a failover some
/// of them know the new master first.
const GRACE: Duration = Duration::from_millis(50);

/// The newest of these replies, and the failures before it. A server that was partitioned has an
/// older one.
pub(super) async fn newest<F, T, E>(
    asked: impl IntoIterator<Item = F>,
    is_newer: impl Fn(&T, &T) -> bool,
    limit: Duration,
) -> (Option<T>, Vec<E>)
where
    F: Future<Output = Result<T, E>>,
{
    let mut replies: FuturesUnordered<_> = asked.into_iter().collect();
    let asked = replies.len();
    let (mut newest, mut failures) = (None::<T>, Vec::new());
    loop {
        let most_have_replied = replies.len() < asked.div_ceil(2);
        let limit = if most_have_replied && newest.is_some() { GRACE } else { limit };
        match timeout(limit, replies.next()).await {
            Ok(Some(Ok(reply))) if newest.as_ref().is_some_and(|newest| !is_newer(&reply, newest)) => {}
            Ok(Some(Ok(reply))) => newest = Some(reply),
            Ok(Some(Err(failure))) => failures.push(failure),
            Ok(None) | Err(_) => return (newest, failures),
        }
    }
}
