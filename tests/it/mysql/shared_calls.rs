//! Many locks share a call.

use futures_util::future::join_all;
use tower_lock::LockError;
use tower_lock_testkit::wait::ms;

use crate::support::environment;

#[tokio::test]
async fn locks_of_one_call_have_replies_of_their_own() {
    let Some(environment) = environment().await else { return };
    let (one, two) = (environment.instance("one").await, environment.instance("two").await);
    let held = join_all((0..100).map(|n| one.lock(("key", 3 * n)).into_future())).await;
    let held: Vec<_> = held.into_iter().map(|guard| guard.expect("free")).collect();
    // Some are held, some are free, and some are new.
    let tries = join_all((0..300).map(|n| two.try_lock(("key", n)).into_future())).await;
    for (n, tried) in tries.iter().enumerate() {
        match tried {
            Ok(guard) => assert!(n % 3 != 0 && guard.held_lock().remaining() > ms(20_000), "{n}"),
            Err(LockError::Busy { lease_left, .. }) => assert!(n % 3 == 0 && *lease_left > ms(20_000), "{n}"),
            Err(error) => panic!("{n}: {error:?}"),
        }
    }
    let fences = held.iter().map(|guard| guard.fencing_token().as_u64()).max();
    join_all(held.into_iter().map(|guard| guard.release().into_future())).await;
    drop(join_all(tries.into_iter().flatten().map(|guard| guard.release().into_future())).await);
    let again = two.lock(("key", 0)).await.expect("free again");
    assert!(Some(again.fencing_token().as_u64()) > fences, "fences rise");
    assert_eq!(one.inspect(("key", 3)).await.expect("a reply").holding, 0);
}
