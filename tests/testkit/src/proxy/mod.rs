//! A proxy that injects network faults between a server and its clients.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::watch,
    task::AbortHandle,
    time::{sleep, timeout},
};

use self::{
    faults::{ArmedFault, Block, PathState, Pushes, WireState},
    wire::Wire,
};
use crate::process::{ReservedPort, TIMEOUT, local};

mod faults;
mod wire;

pub use self::faults::{Chaos, Direction, NetworkFault, Push, Request};

/// A TCP proxy in front of one server. Faults can be set at runtime, for all connections or for
/// one.
///
/// The proxy parses the Redis protocol, so that a fault hits whole requests, replies and messages.
/// Other bytes pass unchanged, and so do `MULTI` and `MONITOR`, whose replies it cannot count.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
    /// Whether the proxy should listen, and whether it does.
    listen: watch::Sender<bool>,
    listens: watch::Receiver<bool>,
    acceptor: AbortHandle,
}

/// Sets the faults of all connections or of one. A fault applies at once and stays until
/// [`heal`](Self::heal).
#[derive(Debug)]
#[must_use = "nothing is switched yet"]
pub struct FaultControl<'a> {
    shared: &'a Shared,
    one: Option<u64>,
}

struct Shared {
    upstream: Mutex<SocketAddr>,
    is_raw: bool,
    table: Mutex<Table>,
    observer: Mutex<Option<Observer>>,
}

type Observer = Box<dyn FnMut(&Request) + Send>;

#[derive(Default)]
struct Table {
    wires: BTreeMap<u64, Arc<Wire>>,
    arrived: u64,
    /// The initial state of new connections.
    state: WireState,
    pushes: Option<Pushes>,
    armed: Vec<ArmedFault>,
    chaos: Option<Chaos>,
    requests: BTreeMap<String, u64>,
    faults: u64,
}

// === impl Proxy ===

impl Proxy {
    /// Starts a proxy in front of a Redis server, on the current runtime.
    ///
    /// # Panics
    ///
    /// Panics if no port is free.
    pub async fn start(upstream: SocketAddr) -> Self {
        Self::begin(upstream, false).await
    }

    /// Starts a proxy in front of any other server. It sees bytes only, no requests, replies and
    /// messages.
    ///
    /// # Panics
    ///
    /// Panics if no port is free.
    pub async fn start_raw(upstream: SocketAddr) -> Self {
        Self::begin(upstream, true).await
    }

    async fn begin(upstream: SocketAddr, is_raw: bool) -> Self {
        let shared =
            Shared { upstream: Mutex::new(upstream), is_raw, table: Mutex::default(), observer: Mutex::new(None) };
        let shared = Arc::new(shared);
        let port = ReservedPort::new();
        let address = local(port.number());
        let listener = listen(address).expect("its own port");
        let ((listen, wanted), (now, listens)) = (watch::channel(true), watch::channel(true));
        let acceptor = accept(Arc::clone(&shared), listener, port, wanted, now);
        let acceptor = tokio::runtime::Handle::current().spawn(acceptor).abort_handle();
        Self { shared, address, listen, listens, acceptor }
    }

    /// The address that the proxy listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL for Redis clients.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Controls the faults of all connections, including new ones.
    pub fn all(&self) -> FaultControl<'_> {
        FaultControl { shared: &self.shared, one: None }
    }

    /// Controls the faults of one connection.
    pub fn connection(&self, number: u64) -> FaultControl<'_> {
        FaultControl { shared: &self.shared, one: Some(number) }
    }

    /// The numbers of the open connections, in order of arrival from zero.
    #[must_use]
    pub fn connections(&self) -> Vec<u64> {
        self.shared.table().wires.keys().copied().collect()
    }

    /// The open connections that have subscribed to a channel.
    #[must_use]
    pub fn subscribers(&self) -> Vec<u64> {
        self.shared.table().wires.values().filter(|wire| wire.subscribes()).map(|wire| wire.number()).collect()
    }

    /// The number of connections ever accepted.
    #[must_use]
    pub fn arrived(&self) -> u64 {
        self.shared.table().arrived
    }

    /// Refuses new connections, or accepts them again. Open connections stay.
    ///
    /// # Panics
    ///
    /// Panics if the proxy has ended.
    pub async fn refuse(&self, refuse: bool) {
        self.listen.send_replace(!refuse);
        let mut listens = self.listens.clone();
        let done = timeout(TIMEOUT, listens.wait_for(|listens| *listens != refuse)).await;
        done.expect("a moment").expect("it runs");
    }

    /// Connects new clients to another server, as after a DNS change. Open connections stay.
    pub fn redirect(&self, upstream: SocketAddr) {
        *wire::lock(&self.shared.upstream) = upstream;
    }

    /// Passes every later request to the observer.
    pub fn observe(&self, observer: impl FnMut(&Request) + Send + 'static) {
        *self.shared.observer.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(observer));
    }

    /// The number of requests by command name, in upper case.
    #[must_use]
    pub fn requests(&self) -> BTreeMap<String, u64> {
        self.shared.table().requests.clone()
    }

    /// Resets the request counts.
    pub fn forget_requests(&self) {
        self.shared.table().requests.clear();
    }

    /// The number of faults injected, explicit and random.
    #[must_use]
    pub fn fault_count(&self) -> u64 {
        self.shared.table().faults
    }

    /// Sets or removes random faults.
    pub fn chaos(&self, chaos: Option<Chaos>) {
        self.shared.table().chaos = chaos;
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.acceptor.abort();
        self.all().cut();
    }
}

async fn accept(
    shared: Arc<Shared>,
    listener: TcpListener,
    // It does not listen. While no other socket does, connections are refused, and no other process
    // can take the port.
    port: ReservedPort,
    mut wanted: watch::Receiver<bool>,
    now: watch::Sender<bool>,
) {
    let address = local(port.number());
    let mut listener = Some(listener);
    loop {
        let is_wanted = *wanted.borrow_and_update();
        if is_wanted && listener.is_none() {
            listener = Some(listen(address).expect("its own port"));
        } else if !is_wanted {
            listener = None;
        }
        now.send_replace(is_wanted);
        let arrival = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            arrived = arrival => match arrived {
                Ok((client, _)) => shared.welcome(client),
                // An error of one connection, or too many open files.
                Err(_) => sleep(Duration::from_millis(10)).await,
            },
            changed = wanted.changed() => if changed.is_err() {
                return;
            },
        }
    }
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(1_024)
}

// === impl Switch ===

impl FaultControl<'_> {
    /// Delays all bytes in this direction.
    pub fn delay(&self, direction: Direction, delay: Duration) {
        self.paths(direction, |path| path.delay = delay);
    }

    /// Holds bytes in this direction until `heal`. They arrive even if their sender has
    /// disconnected.
    pub fn hold(&self, direction: Direction) {
        self.paths(direction, |path| path.block = Block::Hold);
    }

    /// Discards bytes in this direction. `heal` cuts a connection that has lost bytes.
    pub fn swallow(&self, direction: Direction) {
        self.paths(direction, |path| path.block = Block::Swallow);
    }

    /// Removes all faults, including those set for the next request.
    pub fn heal(&self) {
        let mut table = self.shared.table();
        if self.one.is_none() {
            (table.state, table.pushes) = (WireState::default(), None);
            table.armed.clear();
        }
        for wire in table.wires(self.one) {
            wire.disarm();
            wire.set_pushes(None);
            wire.change(|state| *state = WireState { is_cut: state.is_cut, ..WireState::default() });
        }
    }

    /// Closes both sides.
    pub fn cut(&self) {
        for wire in self.shared.table().wires(self.one) {
            wire.change(|state| state.is_cut = true);
        }
    }

    /// Applies the fault to the next request.
    pub fn next(&self, fault: NetworkFault) {
        self.next_where(|_| true, fault);
    }

    /// Applies the fault to the next request with this command name.
    pub fn next_of(&self, name: &str, fault: NetworkFault) {
        let name = name.to_ascii_uppercase();
        self.next_where(move |request| request.name() == name, fault);
    }

    /// Applies the fault once, to the next request that matches, on any connection.
    pub fn next_where(&self, matches: impl Fn(&Request) -> bool + Send + Sync + 'static, fault: NetworkFault) {
        let mut table = self.shared.table();
        let armed = ArmedFault::new(matches, fault);
        match self.one {
            None => table.armed.push(armed),
            Some(number) => {
                if let Some(wire) = table.wires.get(&number) {
                    wire.arm(armed);
                }
            }
        }
    }

    /// Drops messages. Replies pass.
    pub fn drop_pushes(&self) {
        self.pushes(|_| Vec::new());
    }

    /// Delivers each message twice.
    pub fn double_pushes(&self) {
        self.pushes(|push| vec![push.payload.clone(); 2]);
    }

    /// Replaces the content of each message.
    pub fn rewrite_pushes(&self, rewrite: impl Fn(&Push) -> Vec<u8> + Send + Sync + 'static) {
        self.pushes(move |push| vec![rewrite(push)]);
    }

    /// Replaces each message by these.
    pub fn pushes(&self, instead: impl Fn(&Push) -> Vec<Vec<u8>> + Send + Sync + 'static) {
        let instead: Pushes = Arc::new(instead);
        let mut table = self.shared.table();
        for wire in table.wires(self.one) {
            wire.set_pushes(Some(Arc::clone(&instead)));
        }
        if self.one.is_none() {
            table.pushes = Some(instead);
        }
    }

    fn paths(&self, direction: Direction, change: impl Fn(&mut PathState)) {
        let change = |state: &mut WireState| {
            if direction != Direction::Down {
                change(&mut state.up);
            }
            if direction != Direction::Up {
                change(&mut state.down);
            }
        };
        let mut table = self.shared.table();
        if self.one.is_none() {
            change(&mut table.state);
        }
        for wire in table.wires(self.one) {
            wire.change(change);
        }
    }
}

// === impl Shared ===

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn welcome(self: &Arc<Self>, client: TcpStream) {
        let mut table = self.table();
        let wire = Arc::new(Wire::new(table.arrived, table.state, table.pushes.clone()));
        table.arrived += 1;
        table.wires.insert(wire.number(), Arc::clone(&wire));
        drop(table);
        let shared = Arc::clone(self);
        tokio::runtime::Handle::current().spawn(async move {
            wire.run(&shared, client).await;
            shared.table().wires.remove(&wire.number());
        });
    }

    fn send_again(&self, after: Duration, request: Vec<u8>) {
        let upstream = self.upstream();
        tokio::runtime::Handle::current().spawn(async move {
            sleep(after).await;
            let Ok(mut server) = TcpStream::connect(upstream).await else { return };
            // The reply is discarded, but a connection that is closed too early may lose the
            // request.
            if server.write_all(&request).await.is_ok() {
                let _ = timeout(TIMEOUT, server.read_u8()).await;
            }
        });
    }

    /// The address of the server.
    fn upstream(&self) -> SocketAddr {
        *wire::lock(&self.upstream)
    }

    fn next(&self, wire: &Wire, request: &Request) -> Option<NetworkFault> {
        if let Some(observer) = &mut *self.observer.lock().unwrap_or_else(PoisonError::into_inner) {
            observer(request);
        }
        let mut table = self.table();
        *table.requests.entry(request.name()).or_default() += 1;
        let by_order = wire.disarm_for(request).or_else(|| ArmedFault::take(&mut table.armed, request));
        let fault = by_order.or_else(|| table.chaos.as_mut()?.for_request(request));
        table.faults += u64::from(fault.is_some());
        fault
    }

    /// The number of copies of the next message, by random faults.
    fn copies(&self) -> usize {
        let mut table = self.table();
        let copies = table.chaos.as_mut().map_or(1, Chaos::for_push);
        table.faults += u64::from(copies != 1);
        copies
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("upstream", &self.upstream).finish_non_exhaustive()
    }
}

impl Table {
    fn wires(&self, one: Option<u64>) -> impl Iterator<Item = &Wire> {
        let wires = self.wires.values().filter(move |wire| one.is_none_or(|one| one == wire.number()));
        wires.map(|wire| &**wire)
    }
}
