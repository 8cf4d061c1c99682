//! One connection of a client, and the one to the server that goes with it.

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
    faults::{Armed, Block, Mishap, Path, Push, Pushes, Request, State},
};
use crate::resp::Reply;

pub(super) struct Wire {
    number: u64,
    state: watch::Sender<State>,
    armed: Mutex<Vec<Armed>>,
    pushes: Mutex<Option<Pushes>>,
    subscribes: AtomicBool,
    is_raw: AtomicBool,
    /// One of the two sides takes nothing any more.
    is_broken: AtomicBool,
    /// What becomes of the replies to come.
    fates: Mutex<VecDeque<Fate>>,
}

/// What becomes of one reply.
#[derive(Clone, Copy, Debug)]
struct Fate {
    what: What,
    /// How many there are, if these are about messages to come.
    confirmations: Option<usize>,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Pass,
    Swallow,
    Cut(usize),
}

enum Parcel {
    Bytes(Instant, Vec<u8>),
    Cut,
}

#[derive(Clone, Copy)]
enum Side {
    Up,
    Down,
}

/// It is over.
struct Over;

/// Parcels on their way: then whoever sends more has to wait, as on any wire.
const ON_THE_WAY: usize = 256;
/// Replies to come.
const FATES: usize = 1 << 16;
/// What is longer than that is passed on in pieces.
const FRAME: usize = 4 << 20;

// === impl Wire ===

impl Wire {
    pub(super) fn new(number: u64, state: State, pushes: Option<Pushes>) -> Self {
        Self {
            number,
            state: watch::Sender::new(state),
            armed: Mutex::default(),
            pushes: Mutex::new(pushes),
            subscribes: AtomicBool::new(false),
            is_raw: AtomicBool::new(false),
            is_broken: AtomicBool::new(false),
            fates: Mutex::default(),
        }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn subscribes(&self) -> bool {
        self.subscribes.load(Ordering::SeqCst)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut State)) {
        self.state.send_modify(change);
    }

    pub(super) fn arm(&self, armed: Armed) {
        lock(&self.armed).push(armed);
    }

    pub(super) fn disarm(&self) {
        lock(&self.armed).clear();
    }

    pub(super) fn disarm_for(&self, request: &Request) -> Option<Mishap> {
        Armed::take(&mut lock(&self.armed), request)
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
            // Whatever the client has sent has arrived, and it has gone.
            () = self.carry(shared, Side::Up, from_client, to_server) => {}
            () = self.carry(shared, Side::Down, from_server, to_client) => {}
        }
    }

    /// One way, to its end.
    async fn carry(&self, shared: &Shared, side: Side, from: OwnedReadHalf, to: OwnedWriteHalf) {
        let (parcels, on_the_way) = mpsc::channel(ON_THE_WAY);
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
        parcels: mpsc::Sender<Parcel>,
    ) -> Result<(), Over> {
        let (mut read, mut has_a_hole) = (Vec::with_capacity(16 * 1024), false);
        let mut state = self.state.subscribe();
        loop {
            let swallows = state.borrow_and_update().path(side).block == Block::Swallow;
            if has_a_hole && !swallows {
                self.change(|state| state.is_cut = true);
                return Err(Over);
            }
            let before = read.len();
            tokio::select! {
                changed = state.changed() => {
                    changed.map_err(|_| Over)?;
                    continue;
                }
                // A reset is an end, too.
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
            if self.is_raw.load(Ordering::SeqCst) || read.len() - at > FRAME {
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
        parcels: &mpsc::Sender<Parcel>,
    ) -> Result<(), Over> {
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
        let mishap = shared.next(self, &request);
        let what = match mishap {
            None | Some(Mishap::Late(_) | Mishap::Double | Mishap::Again(_)) => What::Pass,
            Some(Mishap::CutInReply(length)) => What::Cut(length),
            Some(Mishap::CutBeforeReply) => What::Cut(0),
            Some(cut @ (Mishap::CutBefore | Mishap::Orphaned(_))) => {
                if let Mishap::Orphaned(after) = cut {
                    shared.send_again(after, bytes.to_vec());
                }
                self.change(|state| state.is_cut = true);
                return Err(Over);
            }
        };
        let twice = mishap == Some(Mishap::Double) && confirmations.is_none();
        if twice {
            self.expect(Fate { what: What::Swallow, confirmations })?;
        }
        // To leave all channels is confirmed as often as there are some: those pass unexpected.
        if confirmations != Some(0) {
            self.expect(Fate { what, confirmations })?;
        }
        if let Some(Mishap::Again(after)) = mishap {
            shared.send_again(after, bytes.to_vec());
        }
        let mut due = Instant::now() + self.state.borrow().up.delay;
        if let Some(Mishap::Late(by)) = mishap {
            due += by;
        }
        for _ in 0..1 + usize::from(twice) {
            parcels.send(Parcel::Bytes(due, bytes.to_vec())).await.map_err(|_| Over)?;
        }
        Ok(())
    }

    fn expect(&self, fate: Fate) -> Result<(), Over> {
        let mut fates = lock(&self.fates);
        fates.push_back(fate);
        if fates.len() > FATES {
            self.change(|state| state.is_cut = true);
            return Err(Over);
        }
        Ok(())
    }

    async fn reply(
        &self,
        shared: &Shared,
        frame: Reply,
        bytes: &[u8],
        parcels: &mpsc::Sender<Parcel>,
    ) -> Result<(), Over> {
        let kind = frame.items().first().and_then(Reply::text).filter(|_| self.subscribes()).unwrap_or_default();
        if ["message", "pmessage", "smessage"].contains(&kind) {
            return self.push(shared, &frame, bytes, parcels).await;
        }
        if matches!(frame, Reply::Push(_)) && !kind.ends_with("subscribe") {
            return self.send(Side::Down, bytes.to_vec(), parcels).await;
        }
        let what = self.fate(kind.ends_with("subscribe"));
        match what {
            What::Pass => self.send(Side::Down, bytes.to_vec(), parcels).await,
            What::Swallow => Ok(()),
            What::Cut(length) => {
                self.send(Side::Down, bytes[..length.min(bytes.len())].to_vec(), parcels).await?;
                parcels.send(Parcel::Cut).await.map_err(|_| Over)
            }
        }
    }

    fn fate(&self, is_confirmation: bool) -> What {
        let mut fates = lock(&self.fates);
        let Some(fate) = fates.front_mut() else { return What::Pass };
        match &mut fate.confirmations {
            Some(left) if is_confirmation && *left > 1 => {
                *left -= 1;
                return fate.what;
            }
            None if is_confirmation => return What::Pass,
            // The last one, an error in their place, or a reply like any other.
            _ => {}
        }
        let what = fate.what;
        fates.pop_front();
        what
    }

    async fn push(
        &self,
        shared: &Shared,
        frame: &Reply,
        bytes: &[u8],
        parcels: &mpsc::Sender<Parcel>,
    ) -> Result<(), Over> {
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
                // As it came: an array, or what the third version has for it.
                again[0] = bytes[0];
                self.send(Side::Down, again, parcels).await?;
            }
        }
        Ok(())
    }

    async fn send(&self, side: Side, bytes: Vec<u8>, parcels: &mpsc::Sender<Parcel>) -> Result<(), Over> {
        let due = Instant::now() + self.state.borrow().path(side).delay;
        parcels.send(Parcel::Bytes(due, bytes)).await.map_err(|_| Over)
    }

    async fn write(&self, side: Side, mut to: OwnedWriteHalf, mut on_the_way: mpsc::Receiver<Parcel>) {
        let mut state = self.state.subscribe();
        let mut is_broken = false;
        while let Some(parcel) = on_the_way.recv().await {
            let Parcel::Bytes(due, bytes) = parcel else {
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
            // What comes from the other side is still to be brought, if anybody is there to have it.
            let both = self.is_broken.swap(true, Ordering::SeqCst);
            self.change(|state| state.is_cut |= both);
            std::future::pending::<()>().await;
        }
    }
}

impl State {
    fn path(&self, side: Side) -> &Path {
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
