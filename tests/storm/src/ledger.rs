//! State that the processes of a storm share: a server of one line after the other.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    runtime::Handle,
};

/// State that replies to lines.
pub(crate) trait Ledger: Send + 'static {
    /// The reply to a line, or `None` if the line is not valid.
    fn reply(&mut self, connection: u64, line: &str) -> Option<String>;

    /// A connection is closed. A killed process writes nothing more: its section is over.
    fn leave(&mut self, connection: u64);
}

/// The server of a ledger.
#[derive(Debug)]
pub(crate) struct LedgerServer<L> {
    pub(crate) address: SocketAddr,
    ledger: Arc<Mutex<L>>,
}

/// A connection to a ledger.
#[derive(Debug)]
pub(crate) struct LedgerClient {
    replies: Lines<BufReader<OwnedReadHalf>>,
    to: OwnedWriteHalf,
}

impl<L: Ledger> LedgerServer<L> {
    pub(crate) async fn start(ledger: L) -> Self {
        let ledger = Arc::new(Mutex::new(ledger));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let here = Arc::clone(&ledger);
        Handle::current().spawn(async move {
            let mut connection = 0;
            while let Ok((stream, _)) = listener.accept().await {
                connection += 1;
                let ledger = Arc::clone(&here);
                Handle::current().spawn(async move {
                    let _ = serve(&ledger, connection, stream).await;
                    lock(&ledger).leave(connection);
                });
            }
        });
        Self { address, ledger }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, L> {
        lock(&self.ledger)
    }
}

async fn serve<L: Ledger>(ledger: &Mutex<L>, connection: u64, stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let (from, mut to) = stream.into_split();
    let mut lines = BufReader::new(from).lines();
    while let Some(line) = lines.next_line().await? {
        let Some(reply) = lock(ledger).reply(connection, &line) else { return Ok(()) };
        to.write_all(format!("{reply}\n").as_bytes()).await?;
    }
    Ok(())
}

fn lock<L>(ledger: &Mutex<L>) -> MutexGuard<'_, L> {
    ledger.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LedgerClient {
    pub(crate) async fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let (from, to) = stream.into_split();
        Ok(Self { replies: BufReader::new(from).lines(), to })
    }

    pub(crate) async fn ask(&mut self, line: String) -> io::Result<String> {
        self.to.write_all(format!("{line}\n").as_bytes()).await?;
        self.replies.next_line().await?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
    }
}
