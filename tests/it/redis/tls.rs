//! TLS to the servers of each topology: trusted roots, and certificates of clients.

use std::{env, fs, path::Path, process::Command};

use tower_lock::{LockManager, store::RedisConnectError};
use tower_lock_testkit::{RedisCluster, RedisServer, Reply, SentinelGroup, certificate, limits, skipped};

use crate::support::{listen_with_tls, pass};

/// Where the settings of a connection are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Url,
    Builder,
}

/// Connects with these settings: the certificate of the folder is its own root.
async fn connect(
    url: &str,
    folder: &Path,
    by: By,
    has_roots: bool,
    has_certificate: bool,
) -> Result<LockManager, RedisConnectError> {
    let path = |name: &str| folder.join(name).display().to_string();
    let text = |name: &str| fs::read(folder.join(name)).expect("made");
    let (mut redis, mut redlock) = (limits::redis(), limits::redlock());
    let mut url = format!("{url}?prefix=tls");
    match by {
        By::Url if has_roots => url += &format!("&sslrootcert={}", path("crt")),
        By::Builder if has_roots => {
            redis = redis.tls_roots(text("crt"));
            redlock = redlock.tls_roots(text("crt"));
        }
        _ => {}
    }
    match by {
        By::Url if has_certificate => url += &format!("&sslcert={}&sslkey={}", path("crt"), path("key")),
        By::Builder if has_certificate => {
            redis = redis.tls_client_certificate(text("crt"), text("key"));
            redlock = redlock.tls_client_certificate(text("crt"), text("key"));
        }
        _ => {}
    }
    if !(has_roots && has_certificate) {
        (redis, redlock) = (redis.connect_timeout(limits::SHORT), redlock.connect_timeout(limits::SHORT));
    }
    Ok(match url.contains("+redlock") {
        true => LockManager::new(redlock.connect([url]).await?),
        false => LockManager::new(redis.connect(&url).await?),
    })
}

/// A folder with a certificate, and a server that listens with it. `None`: there is no TLS here.
async fn server() -> Option<(RedisServer, u16)> {
    if !RedisServer::is_available() {
        skipped("TLS", "redis-server");
        return None;
    }
    let server = RedisServer::start().await;
    if !certificate(server.folder()) {
        skipped("TLS", "openssl");
        return None;
    }
    let Some(port) = listen_with_tls(&server, server.folder()).await else {
        skipped("TLS", "a redis-server with TLS");
        return None;
    };
    Some((server, port))
}

#[tokio::test]
async fn server_and_client_verify_each_other_in_each_topology() {
    let Some((first, port)) = server().await else { return };
    let folder = first.folder();
    let listen = async |server: &RedisServer| listen_with_tls(server, folder).await.expect("it has TLS");
    let (second, third) = (RedisServer::start().await, RedisServer::start().await);
    let redlock = format!("localhost:{port},localhost:{},127.0.0.1:{}", listen(&second).await, listen(&third).await);

    let group = SentinelGroup::options().tls(folder).start(1).await;
    group.monitor("tls", listen(&group.servers()[0]).await).await;
    let sentinels = group.sentinel_tls_addresses().join(",");

    let cluster = RedisCluster::start(1, 0).await;
    let node = listen(cluster.node(0)).await;
    // The node names this port.
    for (name, value) in [("tls-cluster", "yes"), ("cluster-announce-tls-port", &node.to_string())] {
        let reply = cluster.command(0, &["CONFIG", "SET", name, value]).await;
        assert_eq!(reply, Reply::Status("OK".to_owned()), "{name}");
    }

    for url in [
        format!("rediss://localhost:{port}"),
        format!("rediss+sentinel://:{}@{sentinels}/tls", SentinelGroup::PASSWORD),
        format!("rediss+cluster://localhost:{node}"),
        format!("rediss+redlock://{redlock}"),
    ] {
        for by in [By::Url, By::Builder] {
            let error = connect(&url, folder, by, false, true).await.expect_err("a server that is not trusted");
            let text = format!("{error:?}");
            assert!(text.contains("invalid peer certificate"), "{url} {by:?}: {text}");
            let error = connect(&url, folder, by, true, false).await.expect_err("a client without a certificate");
            let text = format!("{error:?}");
            assert!(text.contains("received fatal alert"), "{url} {by:?}: {text}");
            let locks = connect(&url, folder, by, true, true).await;
            pass(&locks.unwrap_or_else(|error| panic!("{url} {by:?}: {error:?}"))).await;
        }
    }
    let url = format!("rediss://localhost:{port}");
    let error = connect(&url, folder, By::Url, false, false).await.expect_err("not trusted");
    assert!(format!("{error:?}").contains("or `SSL_CERT_FILE`, names other roots"), "{error:?}");
    let error = connect(&url, folder, By::Url, true, false).await.expect_err("no certificate");
    assert!(format!("{error:?}").contains("does the server require a certificate of its clients?"), "{error:?}");
    // A trusted certificate of another host.
    let reply = first.command(&["CONFIG", "SET", "bind", "127.0.0.1 127.0.0.2"]).await;
    assert_eq!(reply, Reply::Status("OK".to_owned()));
    let url = format!("rediss://127.0.0.2:{port}");
    let error = connect(&url, folder, By::Url, true, true).await.expect_err("another host");
    assert!(format!("{error:?}").contains("the certificate is for another host name"), "{error:?}");
}

#[tokio::test]
async fn certificate_without_its_key_is_an_error_that_names_both() {
    let Some((server, port)) = server().await else { return };
    let folder = server.folder();
    let other = RedisServer::start().await;
    assert!(certificate(other.folder()));
    let (crt, key) = (folder.join("crt"), other.folder().join("key"));
    let url = format!("rediss://localhost:{port}?sslcert={}&sslkey={}", crt.display(), key.display());
    let error = limits::redis().connect_lazy(&url).expect_err("the key of another certificate");
    assert!(matches!(error, RedisConnectError::InvalidTls(_)), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains(&format!("{crt:?} of `sslcert`")) && text.contains(&format!("{key:?} of `sslkey`")),
        "{text}"
    );
}

/// The trusted roots of a process are those of `SSL_CERT_FILE`: the child has another one.
#[tokio::test]
async fn trusted_roots_are_those_of_ssl_cert_file() {
    const CHILD: &str = "URL_OF_CHILD";
    if let Ok(url) = env::var(CHILD) {
        pass(&LockManager::new(limits::redis().connect(&url).await.expect("trusted"))).await;
        return;
    }
    let Some((server, port)) = server().await else { return };
    let file = |name: &str| server.folder().join(name);
    let (crt, key) = (file("crt"), file("key"));
    let child = Command::new(env::current_exe().expect("a path"))
        .args(["--exact", "tls::trusted_roots_are_those_of_ssl_cert_file"])
        .env("SSL_CERT_FILE", &crt)
        .env(CHILD, format!("rediss://localhost:{port}?sslcert={}&sslkey={}", crt.display(), key.display()))
        .output()
        .expect("it starts");
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && output.contains(" 1 passed;"), "{output}");
}
