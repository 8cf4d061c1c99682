//! Questions to several servers that may know different configurations.

use std::time::Duration;

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::time::timeout;

/// How long to wait for the servers beyond a majority of those that are asked. In a failover some
/// of them know the new master first.
const GRACE: Duration = Duration::from_millis(50);

/// The replies and the failures of these servers, in the order in which they come. A server that
/// was partitioned has an older configuration: the newest one counts.
pub(super) async fn ask_all<F, T, E>(asked: impl IntoIterator<Item = F>, limit: Duration) -> (Vec<T>, Vec<E>)
where
    F: Future<Output = Result<T, E>>,
{
    let mut pending: FuturesUnordered<_> = asked.into_iter().collect();
    let asked = pending.len();
    let (mut replies, mut failures) = (Vec::new(), Vec::new());
    loop {
        let most_have_replied = pending.len() < asked.div_ceil(2);
        let limit = if most_have_replied && !replies.is_empty() { GRACE } else { limit };
        match timeout(limit, pending.next()).await {
            Ok(Some(Ok(reply))) => replies.push(reply),
            Ok(Some(Err(failure))) => failures.push(failure),
            Ok(None) | Err(_) => return (replies, failures),
        }
    }
}
