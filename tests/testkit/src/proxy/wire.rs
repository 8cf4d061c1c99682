//! One client connection and its connection to the server.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};

use super::{
    Shared,
    faults::{ArmedFault, Block, NetworkFault, PathState, Push, Pushes, Request, WireState},
};
use crate::resp::Reply;

pub(super) struct Wire {
    number: u64,
    state: watch::Sender<WireState>,
    armed: Mutex<Vec<ArmedFault>>,
    pushes: Mutex<Option<Pushes>>,
    subscribes: AtomicBool,
    is_raw: AtomicBool,
    /// One of the two sides accepts no more bytes.
    is_broken: AtomicBool,
    /// The actions for pending replies.
    pending_replies: Mutex<VecDeque<PendingReply>>,
}

/// The action for one reply.
#[derive(Clone, Copy, Debug)]
struct PendingReply {
    action: ReplyAction,
    /// The number of confirmations, for a subscribe or unsubscribe command.
    confirmations: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
enum ReplyAction {
    Pass,
    Swallow,
    Cut(usize),
}

enum Chunk {
    Bytes(Instant, Vec<u8>),
    Cut,
}

#[derive(Clone, Copy)]
enum Side {
    Up,
    Down,
}

/// The connection is closed.
struct Closed;

/// Chunks in flight; a sender waits when there are more.
const CHUNKS_IN_FLIGHT: usize = 256;
/// The maximum number of pending replies.
const MAX_PENDING_REPLIES: usize = 1 << 16;
/// It is sent in place of a request that the server is to refuse.
const UNKNOWN_COMMAND: &[u8] = b"*1\r\n$4\r\nNONE\r\n";
/// Longer frames are passed on in pieces.
const MAX_FRAME: usize = 4 << 20;

// === impl Wire ===

impl Wire {
    pub(super) fn new(number: u64, state: WireState, pushes: Option<Pushes>) -> Self {
        Self {
            number,
            state: watch::Sender::new(state),
            armed: Mutex::default(),
            pushes: Mutex::new(pushes),
            subscribes: AtomicBool::new(false),
            is_raw: AtomicBool::new(false),
            is_broken: AtomicBool::new(false),
            pending_replies: Mutex::default(),
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn subscribes(&self) -> bool {
        self.subscribes.load(Ordering::SeqCst)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut WireState)) {
        self.state.send_modify(change);
    }

    pub(super) fn arm(&self, armed: ArmedFault) {
        lock(&self.armed).push(armed);
    }

    pub(super) fn disarm(&self) {
        lock(&self.armed).clear();
    }

    pub(super) fn disarm_for(&self, request: &Request) -> Option<NetworkFault> {
        ArmedFault::take(&mut lock(&self.armed), request)
    }

    pub(super) fn set_pushes(&self, pushes: Option<Pushes>) {
        *lock(&self.pushes) = pushes;
    }

    pub(super) async fn run(&self, shared: &Shared, client: TcpStream) {
        let mut state = self.state.subscribe();
        let server = tokio::select! {
            server = TcpStream::connect(shared.upstream()) => server,
            _ = state.wait_for(|state| state.is_cut) => return,
        };
        let Ok(server) = server else { return };
        let _ = (client.set_nodelay(true), server.set_nodelay(true));
        self.is_raw.store(shared.is_raw, Ordering::SeqCst);
        let ((from_client, to_client), (from_server, to_server)) = (client.into_split(), server.into_split());
        tokio::select! {
            _ = state.wait_for(|state| state.is_cut) => {}
            // All bytes of the client have arrived, and it has disconnected.
            () = self.carry(shared, Side::Up, from_client, to_server) => {}
            () = self.carry(shared, Side::Down, from_server, to_client) => {}
        }
    }

    /// Copies one direction to its end.
    async fn carry(&self, shared: &Shared, side: Side, from: OwnedReadHalf, to: OwnedWriteHalf) {
        let (parcels, on_the_way) = mpsc::channel(CHUNKS_IN_FLIGHT);
        tokio::join!(
            async {
                let _ = self.read(shared, side, from, parcels).await;
            },
            self.write(side, to, on_the_way)
        );
    }

    async fn read(
        &self,
        shared: &Shared,
        side: Side,
        mut from: OwnedReadHalf,
        parcels: mpsc::Sender<Chunk>,
    ) -> Result<(), Closed> {
        let (mut read, mut has_a_hole) = (Vec::with_capacity(16 * 1024), false);
        let mut state = self.state.subscribe();
        loop {
            let swallows = state.borrow_and_update().path(side).block == Block::Swallow;
            if has_a_hole && !swallows {
                self.change(|state| state.is_cut = true);
                return Err(Closed);
            }
            let before = read.len();
            tokio::select! {
                changed = state.changed() => {
                    changed.map_err(|_| Closed)?;
                    continue;
                }
                // A reset ends the direction as well.
                length = from.read_buf(&mut read) => if length.unwrap_or(0) == 0 {
                    return Ok(());
                },
            }
            if swallows || self.state.borrow().path(side).block == Block::Swallow {
                read.truncate(before);
                has_a_hole = true;
                continue;
            }
            let mut at = 0;
            while at < read.len() && !self.is_raw.load(Ordering::SeqCst) {
                let Ok(frame) = Reply::parse(&read[at..]) else {
                    self.is_raw.store(true, Ordering::SeqCst);
                    break;
                };
                let Some((frame, length)) = frame else { break };
                let bytes = &read[at..at + length];
                at += length;
                match side {
                    Side::Up => self.request(shared, frame, bytes, &parcels).await?,
                    Side::Down => self.reply(shared, frame, bytes, &parcels).await?,
                }
            }
            if self.is_raw.load(Ordering::SeqCst) || read.len() - at > MAX_FRAME {
                self.is_raw.store(true, Ordering::SeqCst);
                self.send(side, read[at..].to_vec(), &parcels).await?;
                at = read.len();
            }
            read.drain(..at);
        }
    }

    async fn request(
        &self,
        shared: &Shared,
        frame: Reply,
        bytes: &[u8],
        parcels: &mpsc::Sender<Chunk>,
    ) -> Result<(), Closed> {
        let parts = frame.items().iter().map(|part| match part {
            Reply::Bulk(bytes) => Some(bytes.clone()),
            _ => None,
        });
        let Some(parts) = parts.collect::<Option<Vec<_>>>().filter(|parts| !parts.is_empty()) else {
            self.is_raw.store(true, Ordering::SeqCst);
            return self.send(Side::Up, bytes.to_vec(), parcels).await;
        };
        let request = Request { connection: self.number, parts };
        let confirmations = request.confirmations();
        if confirmations.is_some() {
            self.subscribes.store(true, Ordering::SeqCst);
        }
        let fault = shared.next(self, &request);
        let action = match fault {
            None
            | Some(NetworkFault::Late(_) | NetworkFault::Double | NetworkFault::Again(_) | NetworkFault::Refused) => {
                ReplyAction::Pass
            }
            Some(NetworkFault::CutInReply(length)) => ReplyAction::Cut(length),
            Some(NetworkFault::CutBeforeReply) => ReplyAction::Cut(0),
            Some(cut @ (NetworkFault::CutBefore | NetworkFault::Orphaned(_))) => {
                if let NetworkFault::Orphaned(after) = cut {
                    shared.send_again(after, bytes.to_vec());
                }
                self.change(|state| state.is_cut = true);
                return Err(Closed);
            }
        };
        let twice = fault == Some(NetworkFault::Double) && confirmations.is_none();
        if twice {
            self.expect(PendingReply { action: ReplyAction::Swallow, confirmations })?;
        }
        // An unsubscribe from all channels has one confirmation per channel; they pass as messages.
        if confirmations != Some(0) {
            self.expect(PendingReply { action, confirmations })?;
        }
        if let Some(NetworkFault::Again(after)) = fault {
            shared.send_again(after, bytes.to_vec());
        }
        let bytes = if fault == Some(NetworkFault::Refused) { UNKNOWN_COMMAND } else { bytes };
        let mut due = Instant::now() + self.state.borrow().up.delay;
        if let Some(NetworkFault::Late(by)) = fault {
            due += by;
        }
        for _ in 0..1 + usize::from(twice) {
            parcels.send(Chunk::Bytes(due, bytes.to_vec())).await.map_err(|_| Closed)?;
        }
        Ok(())
    }

    fn expect(&self, pending: PendingReply) -> Result<(), Closed> {
        let mut replies = lock(&self.pending_replies);
        replies.push_back(pending);
        if replies.len() > MAX_PENDING_REPLIES {
            self.change(|state| state.is_cut = true);
            return Err(Closed);
        }
        Ok(())
    }

    async fn reply(
        &self,
        shared: &Shared,
        frame: Reply,
        bytes: &[u8],
        parcels: &mpsc::Sender<Chunk>,
    ) -> Result<(), Closed> {
        let kind = frame.items().first().and_then(Reply::text).filter(|_| self.subscribes()).unwrap_or_default();
        if ["message", "pmessage", "smessage"].contains(&kind) {
            return self.push(shared, &frame, bytes, parcels).await;
        }
        if matches!(frame, Reply::Push(_)) && !kind.ends_with("subscribe") {
            return self.send(Side::Down, bytes.to_vec(), parcels).await;
        }
        let action = self.next_action(kind.ends_with("subscribe"));
        match action {
            ReplyAction::Pass => self.send(Side::Down, bytes.to_vec(), parcels).await,
            ReplyAction::Swallow => Ok(()),
            ReplyAction::Cut(length) => {
                self.send(Side::Down, bytes[..length.min(bytes.len())].to_vec(), parcels).await?;
                parcels.send(Chunk::Cut).await.map_err(|_| Closed)
            }
        }
    }

    fn next_action(&self, is_confirmation: bool) -> ReplyAction {
        let mut replies = lock(&self.pending_replies);
        let Some(pending) = replies.front_mut() else { return ReplyAction::Pass };
        match &mut pending.confirmations {
            Some(left) if is_confirmation && *left > 1 => {
                *left -= 1;
                return pending.action;
            }
            None if is_confirmation => return ReplyAction::Pass,
            // The last confirmation, an error in its place, or any other reply.
            _ => {}
        }
        let action = pending.action;
        replies.pop_front();
        action
    }

    async fn push(
        &self,
        shared: &Shared,
        frame: &Reply,
        bytes: &[u8],
        parcels: &mpsc::Sender<Chunk>,
    ) -> Result<(), Closed> {
        let parts = frame.items().iter().filter_map(|part| match part {
            Reply::Bulk(bytes) => Some(&bytes[..]),
            _ => None,
        });
        let parts: Vec<_> = parts.collect();
        let rule = lock(&self.pushes).clone();
        let copies = shared.copies();
        let [head @ .., channel, payload] = &parts[..] else {
            return self.send(Side::Down, bytes.to_vec(), parcels).await;
        };
        let push = Push { connection: self.number, channel: channel.to_vec(), payload: payload.to_vec() };
        let payloads = rule.map_or_else(|| vec![push.payload.clone()], |rule| rule(&push));
        for _ in 0..copies {
            for payload in &payloads {
                let parts: Vec<&[u8]> = head.iter().copied().chain([*channel, payload]).collect();
                let mut again = crate::resp::encode(&parts);
                // Keeps the type byte: an array, or a push in RESP3.
                again[0] = bytes[0];
                self.send(Side::Down, again, parcels).await?;
            }
        }
        Ok(())
    }

    async fn send(&self, side: Side, bytes: Vec<u8>, parcels: &mpsc::Sender<Chunk>) -> Result<(), Closed> {
        let due = Instant::now() + self.state.borrow().path(side).delay;
        parcels.send(Chunk::Bytes(due, bytes)).await.map_err(|_| Closed)
    }

    async fn write(&self, side: Side, mut to: OwnedWriteHalf, mut on_the_way: mpsc::Receiver<Chunk>) {
        let mut state = self.state.subscribe();
        let mut is_broken = false;
        while let Some(parcel) = on_the_way.recv().await {
            let Chunk::Bytes(due, bytes) = parcel else {
                self.change(|state| state.is_cut = true);
                break;
            };
            if is_broken {
                continue;
            }
            sleep_until(due).await;
            if state.wait_for(|state| state.path(side).block != Block::Hold).await.is_err() {
                return;
            }
            is_broken = to.write_all(&bytes).await.is_err();
        }
        if is_broken {
            // Delivers the remaining bytes of the other side.
            let both = self.is_broken.swap(true, Ordering::SeqCst);
            self.change(|state| state.is_cut |= both);
            std::future::pending::<()>().await;
        }
    }
}

impl WireState {
    fn path(&self, side: Side) -> &PathState {
        match side {
            Side::Up => &self.up,
            Side::Down => &self.down,
        }
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("number", &self.number).finish_non_exhaustive()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
