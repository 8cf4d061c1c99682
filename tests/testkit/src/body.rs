//! A body that follows a script.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::http::HeaderMap;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    time::{Sleep, sleep},
};

/// The next step of a body.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// A frame of this many bytes.
    Data(usize),
    /// A frame with this text.
    Text(&'static str),
    /// The trailer `x-end: 1`.
    Trailers,
    /// An error instead of a frame.
    Error(&'static str),
    /// Panics with this message.
    Panic(&'static str),
    /// Waits for a millisecond.
    Pause,
    /// Waits forever.
    Stall,
}

/// Sends further steps to a body, which ends when this is dropped.
pub type Feed = UnboundedSender<Step>;

/// A body that takes its steps, and then ends.
pub struct ScriptedBody {
    steps: VecDeque<Step>,
    feed: Option<UnboundedReceiver<Step>>,
    /// The rest of the announced size.
    size: Option<u64>,
    knows_end: bool,
    on_poll: Option<Box<dyn FnMut() + Send>>,
    pause: Option<Pin<Box<Sleep>>>,
    is_dropped: Arc<AtomicBool>,
}

/// The trailers of [`Step::Trailers`].
pub fn trailers() -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-end", "1".parse().expect("a value"));
    trailers
}

/// These steps, with a pause before each and before the end.
pub fn paused(steps: &[Step]) -> Vec<Step> {
    let mut paused: Vec<_> = steps.iter().flat_map(|step| [Step::Pause, *step]).collect();
    paused.push(Step::Pause);
    paused
}

// === impl ScriptedBody ===

impl ScriptedBody {
    /// A body without a size hint.
    pub fn new(steps: impl Into<VecDeque<Step>>) -> Self {
        let is_dropped = Arc::default();
        Self { steps: steps.into(), feed: None, size: None, knows_end: false, on_poll: None, pause: None, is_dropped }
    }

    /// A body that gets its steps while it is read.
    pub fn fed() -> (Feed, Self) {
        let (feed, steps) = unbounded_channel();
        let mut body = Self::new([]);
        body.feed = Some(steps);
        (feed, body)
    }

    /// Announces this size in its hint, of which each frame takes its part.
    #[must_use]
    pub fn announce(mut self, size: u64) -> Self {
        self.size = Some(size);
        self
    }

    /// Announces the size of its steps.
    #[must_use]
    pub fn announce_steps(self) -> Self {
        let size = self.steps.iter().map(|step| step.size()).sum();
        self.announce(size)
    }

    /// Reports its end with the last announced byte (`is_end_stream`).
    #[must_use]
    pub fn know_end(mut self) -> Self {
        self.knows_end = true;
        self
    }

    /// Calls this at each poll.
    #[must_use]
    pub fn on_poll(mut self, call: impl FnMut() + Send + 'static) -> Self {
        self.on_poll = Some(Box::new(call));
        self
    }

    /// A flag that is set when the body is dropped.
    pub fn is_dropped(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_dropped)
    }
}

impl Body for ScriptedBody {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        if let Some(call) = &mut self.on_poll {
            call();
        }
        loop {
            if let Some(pause) = &mut self.pause {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            let step = match (self.steps.pop_front(), &mut self.feed) {
                (None, Some(feed)) => ready!(feed.poll_recv(cx)),
                (step, _) => step,
            };
            let Some(step) = step else { return Poll::Ready(None) };
            if let Some(size) = &mut self.size {
                *size -= step.size();
            }
            return Poll::Ready(Some(match step {
                Step::Data(len) => Ok(Frame::data(Bytes::from(vec![b'x'; len]))),
                Step::Text(text) => Ok(Frame::data(Bytes::from_static(text.as_bytes()))),
                Step::Trailers => Ok(Frame::trailers(trailers())),
                Step::Error(error) => Err(error),
                Step::Panic(message) => panic!("{message}"),
                Step::Pause => {
                    self.pause = Some(Box::pin(sleep(Duration::from_millis(1))));
                    continue;
                }
                Step::Stall => {
                    self.steps.push_front(Step::Stall);
                    return Poll::Pending;
                }
            }));
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.size.map_or_else(SizeHint::new, SizeHint::with_exact)
    }

    fn is_end_stream(&self) -> bool {
        self.knows_end && self.size == Some(0)
    }
}

impl fmt::Debug for ScriptedBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScriptedBody").field("steps", &self.steps).field("size", &self.size).finish_non_exhaustive()
    }
}

impl Drop for ScriptedBody {
    fn drop(&mut self) {
        self.is_dropped.store(true, SeqCst);
    }
}

// === impl Step ===

impl Step {
    /// The number of bytes of its frame.
    fn size(self) -> u64 {
        match self {
            Self::Data(len) => len as u64,
            Self::Text(text) => text.len() as u64,
            Self::Trailers | Self::Error(_) | Self::Panic(_) | Self::Pause | Self::Stall => 0,
        }
    }
}
