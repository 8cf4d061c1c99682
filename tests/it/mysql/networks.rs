//! What an address may lead to: a pooler, a replica that was promoted, tables that were made again,
//! a server with TLS.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    time::Duration,
};

use mysql_async::{Row, prelude::Queryable};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower_lock::{
    LockError, LockKey, LockManager,
    store::{AcquireReply, IfBusy, StoreErrorKind},
    test_util::conformance,
};
use tower_lock_testkit::{
    MariaDb, Proxy, TempFolder,
    caller::{Caller, LONG},
    certificate,
    sections::Sections,
    skipped,
    wait::{soon, until},
};

use crate::support::{Environment, environment, own_environment};

/// Passes the bytes of a client on, and executes each of its statements in a new session, as a
/// pooler may.
async fn pool(mut client: TcpStream, server: SocketAddr, statements: &AtomicU32) -> io::Result<()> {
    let (mut session, greeting) = greeted(server).await?;
    client.write_all(&greeting).await?;
    // Without a password, it fits each greeting.
    let login = packet(&mut client).await?;
    session.write_all(&login).await?;
    client.write_all(&packet(&mut session).await?).await?;
    let mut reply = [0; 4096];
    loop {
        tokio::select! {
            // The server is silent between two statements.
            statement = packet(&mut client) => {
                (session, _) = greeted(server).await?;
                session.write_all(&login).await?;
                packet(&mut session).await?;
                session.write_all(&statement?).await?;
                statements.fetch_add(1, SeqCst);
            }
            read = session.read(&mut reply) => match read? {
                0 => return Ok(()),
                length => client.write_all(&reply[..length]).await?,
            }
        }
    }
}

/// A session, and the first packet of its server.
async fn greeted(server: SocketAddr) -> io::Result<(TcpStream, Vec<u8>)> {
    let mut session = TcpStream::connect(server).await?;
    let greeting = packet(&mut session).await?;
    Ok((session, greeting))
}

/// The length in three bytes, a number, and so many bytes.
async fn packet(from: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = [0; 4];
    from.read_exact(&mut head).await?;
    let length = usize::from(head[0]) + (usize::from(head[1]) << 8) + (usize::from(head[2]) << 16);
    let mut packet = head.to_vec();
    packet.resize(4 + length, 0);
    from.read_exact(&mut packet[4..]).await?;
    Ok(packet)
}

/// Nothing needs a session.
///
/// Guarantee: G6.
#[tokio::test]
async fn each_call_may_have_a_session_of_its_own() {
    let Some(environment) = environment().await else { return };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let (address, server) = (listener.local_addr().expect("bound"), environment.address());
    let statements = Arc::<AtomicU32>::default();
    let accepts = tokio::spawn({
        let statements = Arc::clone(&statements);
        async move {
            while let Ok((client, _)) = listener.accept().await {
                let statements = Arc::clone(&statements);
                tokio::spawn(async move { pool(client, server, &statements).await });
            }
        }
    });
    let store = environment.builder().connect(&environment.url_at(address)).await.expect("it is up");
    conformance::check(Arc::new(store)).await;
    assert!(statements.load(SeqCst) > 100, "{statements:?}");
    accepts.abort();
}

/// An address that leads to other tables, while the process of the locks goes on.
///
/// Guarantee: G1.
#[tokio::test]
async fn tables_that_were_made_again_are_not_those_of_the_start() {
    let Some(environment) = environment().await else { return };
    let store = environment.store().await;
    let (caller, key) = (Caller::new(&store, "a"), LockKey::from(("k",)));
    caller.granted(&key, &caller.id(), LONG).await;
    let tables = ["locks", "fences", "shares", "records", "floor"];
    let rename = |from: &str, to: &str| {
        let renamed = tables.map(|table| format!("{from}_{table} TO {to}_{table}")).join(", ");
        format!("RENAME TABLE {renamed}")
    };
    environment.admin(&rename("{p}", "former_{p}")).await;
    // The procedures are there.
    environment.admin("DROP PROCEDURE {p}_leave_answer").await;
    environment.store().await;
    environment.kill_sessions().await;
    until("other tables are refused", async || {
        let error = caller.acquire(&key, &caller.id(), LONG, IfBusy::Fail).await.expect_err("other tables");
        error.kind() == StoreErrorKind::Refused
    })
    .await;
    environment.admin(&rename("{p}", "later_{p}")).await;
    environment.admin(&rename("former_{p}", "{p}")).await;
    until("its own tables are there again", async || {
        let reply = caller.acquire(&key, &caller.id(), LONG, IfBusy::Fail).await;
        assert!(!matches!(reply, Ok(AcquireReply::Granted { .. })), "{reply:?}");
        reply.is_ok()
    })
    .await;
}

/// A primary that waits for its replica, and the replica.
async fn replicated() -> Option<(Environment, MariaDb)> {
    if std::env::var_os("MYSQLD").is_some() {
        skipped("semi-synchronous replication", "a MariaDB");
        return None;
    }
    let environment = own_environment(&["--log-bin=log", "--server-id=1"]).await?;
    let of_replica = ["--server-id=2", "--rpl-semi-sync-slave-enabled=ON", "--read-only=ON"];
    let replica = MariaDb::installed(&["app"], &of_replica).await;
    Some((environment, replica))
}

/// Guarantee: G1.
#[tokio::test]
async fn promoted_replica_of_mysql_has_each_lock() {
    let Some((environment, replica)) = replicated().await else { return };
    let mut promoted = mysql_async::Conn::from_url(replica.url("app")).await.expect("it is up");
    let follow = format!(
        "CHANGE MASTER TO master_host = '127.0.0.1', master_port = {}, master_user = 'root', master_use_gtid = slave_pos",
        environment.server().port()
    );
    promoted.query_drop(follow).await.expect("set");
    promoted.query_drop("START SLAVE").await.expect("started");
    environment.admin("SET GLOBAL rpl_semi_sync_master_timeout = 600000").await;
    environment.admin("SET GLOBAL rpl_semi_sync_master_enabled = ON").await;
    let follows = "SHOW GLOBAL STATUS LIKE 'Rpl_semi_sync_master_clients'";
    until("it follows", async || environment.value::<u32>(follows, 1).await == 1).await;

    let proxy = Proxy::start_raw(environment.address()).await;
    let url = environment.url_at(proxy.address());
    let instance = async |name: &str| {
        let store = environment.builder().connect(&url).await.expect("it is up");
        LockManager::builder(store).instance(name).lease(LONG).build()
    };
    let instances = [instance("a").await, instance("b").await];
    let sections = Arc::<Sections>::default();
    let tasks = sections.run(&instances);
    sections.go_on("sections before the failover").await;
    let held = instances[0].lock(("held",)).await.expect("free");
    // Without the replica, nothing is granted.
    promoted.query_drop("STOP SLAVE IO_THREAD").await.expect("stopped");
    let alone = instances[1].try_lock(("other",)).await;
    assert!(matches!(alone, Err(LockError::Store(_))), "{alone:?}");
    promoted.query_drop("START SLAVE IO_THREAD").await.expect("started");
    sections.go_on("sections beside the replica").await;

    environment.server().crash().await;
    promoted.query_drop("STOP SLAVE IO_THREAD").await.expect("stopped");
    while {
        let row: Row = promoted.query_first("SHOW SLAVE STATUS").await.expect("a reply").expect("a replica");
        let applied: String = promoted.query_first("SELECT @@gtid_slave_pos").await.expect("a reply").expect("a row");
        row.get::<String, _>("Gtid_IO_Pos").expect("a column") != applied
    } {}
    promoted.query_drop("STOP SLAVE").await.expect("stopped");
    promoted.query_drop("SET GLOBAL read_only = OFF").await.expect("promoted");
    proxy.redirect(SocketAddr::from((Ipv4Addr::LOCALHOST, replica.port())));
    sections.go_on("sections after the failover").await;
    let busy = instances[1].lock(("held",)).wait(Duration::ZERO).await;
    assert!(matches!(busy, Err(LockError::Busy { .. })), "{busy:?}");
    let token = held.fencing_token();
    held.release().await.expect("it is still held");
    let next = soon("a grant", instances[1].lock(("held",)).into_future()).await.expect("free");
    assert!(next.fencing_token() > token);
    next.release().await.expect("held");
    sections.end(tasks).await;
}

#[tokio::test]
async fn tls_to_mysql_requires_a_trusted_certificate_of_the_host() {
    let folder = TempFolder::create();
    if !certificate(folder.path()) {
        return skipped("TLS", "openssl");
    }
    let file = |name: &str| folder.path().join(name).display().to_string();
    let [of_server, key, of_clients] =
        [("cert", "crt"), ("key", "key"), ("ca", "crt")].map(|(name, of)| format!("--ssl-{name}={}", file(of)));
    let settings = [&of_server, &key, &of_clients, "--bind-address=0.0.0.0"];
    let Some(environment) = own_environment(&settings).await else { return };
    environment.store().await;
    environment.admin("ALTER USER {p}@'127.0.0.1' REQUIRE SSL").await;
    let connect = async |host: &str, parameters: &str| {
        let url = environment.url().replace("127.0.0.1", host);
        environment.builder().connect(&format!("{url}?{parameters}")).await
    };
    let trusted = format!("sslrootcert={}", file("crt"));
    for (host, parameters, hint) in [
        ("127.0.0.1", String::new(), "does it require TLS (`sslmode`)"),
        ("localhost", "sslmode=require".to_owned(), "`sslrootcert`"),
        ("127.0.0.2", format!("sslmode=require&{trusted}"), "for another host name"),
    ] {
        let text = format!("{:?}", connect(host, &parameters).await.map(drop).expect_err(&parameters));
        assert!(text.contains(hint), "{host} {parameters}: {text}");
    }
    let works = async |parameters: &str| {
        let locks = LockManager::new(connect("localhost", parameters).await.expect(parameters));
        locks.lock(("k",)).await.expect("free").release().await.expect("held");
    };
    for mode in ["require", "verify-ca", "verify-full"] {
        works(&format!("sslmode={mode}&{trusted}")).await;
    }
    // With a certificate of the client.
    environment.admin("ALTER USER {p}@'127.0.0.1' REQUIRE X509").await;
    let refused = connect("localhost", &format!("sslmode=require&{trusted}")).await.map(drop);
    let text = format!("{:?}", refused.expect_err("no certificate"));
    assert!(text.contains("or a certificate?"), "{text}");
    works(&format!("sslmode=require&{trusted}&sslcert={}&sslkey={}", file("crt"), file("key"))).await;
}
