//! Errors of connecting, which say what to do; rights; TLS.

use std::{fs, time::Duration};

use tokio::{io::AsyncWriteExt, net::TcpListener};
use tower_lock::{
    LockManager,
    store::{StoreErrorKind, ZooKeeperStore, ZooKeeperStoreBuilder},
};
use tower_lock_testkit::{ZooKeeper, certificate, limits, locks::key, skipped, wait::until};

use crate::support::{environment, is_installed, own_environment};

async fn error(builder: ZooKeeperStoreBuilder, url: &str) -> String {
    format!("{:?}", builder.connect(url).await.map(drop).expect_err("no store"))
}

#[tokio::test]
async fn connect_to_zookeeper_says_what_to_do() {
    let Some(environment) = environment().await else { return };
    let (url, none) = (environment.url(), || ZooKeeperStore::builder().connect_timeout(limits::CONNECT));
    // Another server might grant the session, so that connecting is retried.
    let brief = || ZooKeeperStore::builder().connect_timeout(Duration::from_secs(3));
    for (builder, url, says) in [
        (none(), format!("{url}/zookeeper"), "`/zookeeper` has nodes of another program"),
        (brief().session(Duration::from_secs(3_600)), url.clone(), "raise `maxSessionTimeout` of each server"),
        (none().session(Duration::from_secs(2)), url.clone(), "`session` is 2s, but must be from 7s to 3600s"),
        (none().root("tower-lock"), url.clone(), "root `tower-lock`: a root is a path such as `/shop/locks`"),
        (none().root("/a"), format!("{url}/b"), "its parameter `root` is not that of the builder"),
    ] {
        let text = error(builder, &url).await;
        assert!(text.contains(says), "{text}");
    }
    let none = || ZooKeeperStore::builder().connect_timeout(limits::SHORT);
    let text = error(none(), "zk://ann:s3cret@127.0.0.1:1").await;
    assert!(text.contains("is a majority of the servers up, and the address correct?"), "{text}");
    assert!(text.contains("127.0.0.1:1") && !text.contains("s3cret"), "{text}");
    // A server that accepts, and does not reply.
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let text = error(none(), &format!("zk://{}", silent.local_addr().expect("bound"))).await;
    assert!(text.contains("timed out connecting"), "{text}");
    // Another program.
    let address = silent.local_addr().expect("bound");
    let other = tokio::spawn(async move {
        while let Ok((mut stream, _)) = silent.accept().await {
            drop(stream.write_all(b"-ERR unknown command\r\n").await);
        }
    });
    let text = error(none(), &format!("zk://{address}")).await;
    assert!(text.contains("is it a ZooKeeper?"), "{text}");
    other.abort();
}

#[tokio::test]
async fn connect_without_a_majority_says_so() {
    let Some(environment) = own_environment(3).await else { return };
    let servers = environment.servers();
    servers.kill(0);
    servers.kill(1);
    until("no leader", async || servers.mode(2).await.is_none()).await;
    let text = error(ZooKeeperStore::builder().connect_timeout(limits::SHORT), &environment.url()).await;
    assert!(text.contains("majority"), "{text}");
}

/// The nodes of a user are of this user alone.
///
/// Guarantee: G1.
#[tokio::test]
async fn nodes_of_a_user_are_private() {
    let Some(environment) = environment().await else { return };
    let url = |user: &str| environment.url().replace("://", &format!("://{user}@")) + "/private";
    let connect = async |url: &str| LockManager::connect(url).await.map(|locks| locks.lease(Duration::from_secs(2)));
    let ann = connect(&url("ann:s3cret")).await.expect("up").build();
    let held = ann.lock(key()).await.expect("free");
    for other in [url("bob:s3cret"), url("ann:other"), environment.url() + "/private"] {
        let text = format!("{:?}", connect(&other).await.map(drop).expect_err("no right"));
        assert!(text.contains("the user may not make or read nodes") && !text.contains("s3cret"), "{text}");
    }
    // Nodes that each client of the ensemble may write.
    let open = environment.url() + "/open";
    drop(connect(&open).await.expect("up"));
    let text = format!("{:?}", connect(&open.replace("://", "://ann:s3cret@")).await.map(drop).expect_err("open"));
    assert!(text.contains("clients without a user may write below `"), "{text}");
    let again = connect(&url("ann:s3cret").replace("zookeeper:", "ZK:")).await.expect("up").build();
    assert!(again.try_lock(key()).await.is_err(), "the same locks");
    held.release().await.expect("held");
    again.try_lock(key()).await.expect("free").release().await.expect("held");
    again.health().await.expect("ready");
}

/// Guarantee: G18, G22, G25.
#[tokio::test]
async fn zookeeper_has_neither_records_nor_permits() {
    let Some(environment) = environment().await else { return };
    let locks = LockManager::new(environment.store(Duration::from_secs(40)).await);
    let text = format!("{:?}", locks.once(key()).run(async |_| ()).await.map(drop).expect_err("no records"));
    assert!(text.contains("`RedisStore`, `PostgresStore` or `MysqlStore`"), "{text}");
    let text = format!("{:?}", locks.permit(key(), 3).await.map(drop).expect_err("no permits"));
    assert!(text.contains("grants a key to one holder at a time"), "{text}");
    let text = format!("{:?}", locks.read(key()).await.map(drop).expect_err("no reads"));
    assert!(text.contains("grants a key to one holder at a time"), "{text}");
}

/// A lease that the session does not cover.
#[tokio::test]
async fn lease_that_is_longer_than_a_session_is_refused() {
    let Some(environment) = environment().await else { return };
    let locks = LockManager::builder(environment.store(Duration::from_secs(20)).await).build();
    let error = locks.try_lock(key()).await.map(drop).expect_err("30 s");
    let tower_lock::LockError::Store(error) = error else { panic!("{error:?}") };
    assert_eq!(error.kind(), StoreErrorKind::Refused);
    assert!(format!("{error:?}").contains("need a session of 35s, and this one has 20s"), "{error:?}");
}

#[tokio::test]
async fn tls_to_zookeeper_needs_a_certificate_of_both() {
    if !is_installed() {
        return;
    }
    let port = tower_lock_testkit::ReservedPort::new();
    let secure = |folder: &std::path::Path| {
        if !certificate(folder) {
            return String::new();
        }
        let text = ["key", "crt"].map(|name| fs::read_to_string(folder.join(name)).expect("made"));
        fs::write(folder.join("both.pem"), text.concat()).expect("a file");
        fs::write(folder.join("trusted.pem"), &text[1]).expect("a file");
        format!(
            "secureClientPort={}\nserverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
             ssl.keyStore.location=both.pem\nssl.keyStore.type=PEM\nssl.trustStore.location=trusted.pem\n\
             ssl.trustStore.type=PEM\n",
            port.number()
        )
    };
    let servers = ZooKeeper::start_with(1, secure).await;
    let file = |name| fs::read(servers.folder(0).join(name));
    let (Ok(crt), Ok(key)) = (file("crt"), file("key")) else { return skipped("TLS of ZooKeeper", "openssl") };
    let builder = || ZooKeeperStore::builder().connect_timeout(limits::CONNECT);
    let url = format!("zookeepers://localhost:{}", port.number());
    let store = builder().tls_roots(crt.clone()).tls_client_certificate(crt.clone(), key.clone()).connect(&url).await;
    let locks = LockManager::new(store.expect("TLS"));
    locks.try_lock(("tls",)).await.expect("free").release().await.expect("held");
    let builder = || ZooKeeperStore::builder().connect_timeout(limits::SHORT);
    for (builder, says) in [
        (builder().tls_roots(crt.clone()), "does the server require a certificate of its clients?"),
        (builder(), "does this system trust the issuer of the certificate?"),
    ] {
        let text = error(builder, &url).await;
        assert!(text.contains(says), "{text}");
    }
    let text = error(builder().tls_roots(crt), &url.replace("zookeepers", "zookeeper")).await;
    assert!(text.contains("`tls_roots` needs a URL with TLS"), "{text}");
}
