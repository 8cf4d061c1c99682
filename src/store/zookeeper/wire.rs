//! The requests of ZooKeeper that locks need, and their replies. Pure.
//!
//! A lock of ZooKeeper is a node of a session, and ends with it: a client must show when its
//! session begins, ends and gets a heartbeat. Eleven requests are enough for that.
//!
//! A frame is a length in four bytes and as many bytes. Numbers are big endian. A text or an array
//! of bytes has its length in front, and -1 for none.

/// A request: its kind, and its body without a header.
#[derive(Debug)]
pub(crate) struct Request {
    kind: i32,
    body: Vec<u8>,
}

/// What a frame of the server is.
#[derive(Debug, PartialEq)]
pub(crate) enum Frame<'a> {
    /// The reply to the oldest request without one: its number, the error, and the body.
    Reply { number: i32, zxid: i64, error: i32, body: &'a [u8] },
    /// The reply to a ping.
    Pong,
    /// The node at this path has changed, or is gone: a request has asked for this event.
    Event { path: &'a str },
}

/// The reply to a handshake.
#[derive(Debug, PartialEq)]
pub(crate) struct Connected {
    pub(crate) timeout_ms: u32,
    /// Zero: the session has ended.
    pub(crate) session: i64,
    pub(crate) password: Vec<u8>,
}

/// When a node was made and changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stat {
    pub(crate) created_ms: i64,
    pub(crate) changed_ms: i64,
}

/// What a create makes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mode {
    Persistent = 0,
    /// The node ends with the session.
    Ephemeral = 1,
    /// Persistent. The name gets a number, which rises for each such node of the parent.
    Sequential = 2,
    /// Both.
    EphemeralSequential = 3,
}

/// Reads a body.
struct Reader<'a>(&'a [u8]);

/// The longest frame that is read: the names of some 50,000 nodes.
pub(crate) const MAX_FRAME: usize = 16 << 20;

/// Errors of the server that locks expect.
pub(crate) const NO_NODE: i32 = -101;
pub(crate) const NODE_EXISTS: i32 = -110;
pub(crate) const NOT_EMPTY: i32 = -111;

const DELETE: i32 = 2;
const EXISTS: i32 = 3;
const GET_DATA: i32 = 4;
const SET_DATA: i32 = 5;
const GET_ACL: i32 = 6;
const GET_CHILDREN: i32 = 8;
const SYNC: i32 = 9;
const PING: i32 = 11;
const MULTI: i32 = 14;
const CREATE: i32 = 15;
const AUTH: i32 = 100;
const CLOSE: i32 = -11;

/// Numbers that no request has.
const EVENT_NUMBER: i32 = -1;
const PING_NUMBER: i32 = -2;
const AUTH_NUMBER: i32 = -4;

const ANY_VERSION: i32 = -1;
const ALL_RIGHTS: i32 = 31;
const READ_RIGHT: i32 = 1;

impl Request {
    /// Makes a node. `is_private`: for the user of this connection alone.
    pub(crate) fn create(path: &str, data: &[u8], mode: Mode, is_private: bool) -> Self {
        let (scheme, id) = if is_private { ("auth", "") } else { ("world", "anyone") };
        Self::new(CREATE).text(path).bytes(data).int(1).int(ALL_RIGHTS).text(scheme).text(id).int(mode as i32)
    }

    pub(crate) fn delete(path: &str) -> Self {
        Self::new(DELETE).text(path).int(ANY_VERSION)
    }

    pub(crate) fn exists(path: &str) -> Self {
        Self::new(EXISTS).text(path).flag(false)
    }

    /// `watches`: an event follows when the node is changed, or gone. (With `exists` a watch would
    /// stay on a node that is gone already.)
    pub(crate) fn data(path: &str, watches: bool) -> Self {
        Self::new(GET_DATA).text(path).flag(watches)
    }

    /// Asks for the rights of each user on a node.
    pub(crate) fn rights(path: &str) -> Self {
        Self::new(GET_ACL).text(path)
    }

    pub(crate) fn set_data(path: &str, data: &[u8]) -> Self {
        Self::new(SET_DATA).text(path).bytes(data).int(ANY_VERSION)
    }

    pub(crate) fn children(path: &str) -> Self {
        Self::new(GET_CHILDREN).text(path).flag(false)
    }

    /// The reads behind it see each write that was executed before it.
    pub(crate) fn sync(path: &str) -> Self {
        Self::new(SYNC).text(path)
    }

    /// All of these or none, as one transaction. For creates and deletes.
    pub(crate) fn multi(requests: impl IntoIterator<Item = Self>) -> Self {
        let one = |all: Self, one: Self| {
            let mut all = all.int(one.kind).flag(false).int(ANY_VERSION);
            all.body.extend(one.body);
            all
        };
        requests.into_iter().fold(Self::new(MULTI), one).int(-1).flag(true).int(-1)
    }

    /// Ends the session.
    pub(crate) fn close() -> Self {
        Self::new(CLOSE)
    }

    fn new(kind: i32) -> Self {
        Self { kind, body: Vec::with_capacity(64) }
    }

    fn int(mut self, number: i32) -> Self {
        self.body.extend(number.to_be_bytes());
        self
    }

    fn long(mut self, number: i64) -> Self {
        self.body.extend(number.to_be_bytes());
        self
    }

    fn flag(mut self, flag: bool) -> Self {
        self.body.push(flag.into());
        self
    }

    fn bytes(self, bytes: &[u8]) -> Self {
        let mut with_length = self.int(i32::try_from(bytes.len()).unwrap_or(i32::MAX));
        with_length.body.extend(bytes);
        with_length
    }

    fn text(self, text: &str) -> Self {
        self.bytes(text.as_bytes())
    }

    /// Appends the frame of this request, with its number.
    pub(crate) fn write(&self, number: i32, out: &mut Vec<u8>) {
        frame(out, &[&number.to_be_bytes(), &self.kind.to_be_bytes(), &self.body]);
    }
}

/// The frame that begins a session, or continues that of an earlier connection.
pub(crate) fn handshake(out: &mut Vec<u8>, last_zxid: i64, timeout_ms: i32, session: i64, password: &[u8]) {
    let body = Request::new(0).int(0).long(last_zxid).int(timeout_ms).long(session).bytes(password).flag(false);
    frame(out, &[&body.body]);
}

/// The frame that names a user. Its reply has an error if the server has no such scheme.
pub(crate) fn login(out: &mut Vec<u8>, user: &str, password: &str) {
    let request = Request::new(AUTH).int(0).text("digest").text(&format!("{user}:{password}"));
    request.write(AUTH_NUMBER, out);
}

/// The frame of a ping.
pub(crate) fn ping(out: &mut Vec<u8>) {
    Request::new(PING).write(PING_NUMBER, out);
}

fn frame(out: &mut Vec<u8>, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    out.extend(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
    parts.iter().for_each(|part| out.extend(*part));
}

/// The reply to a handshake, without its length.
pub(crate) fn connected(frame: &[u8]) -> Option<Connected> {
    let mut reader = Reader(frame);
    let _version = reader.int()?;
    let timeout_ms = u32::try_from(reader.int()?).unwrap_or(0);
    Some(Connected { timeout_ms, session: reader.long()?, password: reader.bytes()?.to_vec() })
}

/// A frame after the handshake, without its length.
pub(crate) fn parse(frame: &[u8]) -> Option<Frame<'_>> {
    let mut reader = Reader(frame);
    let (number, zxid, error) = (reader.int()?, reader.long()?, reader.int()?);
    Some(match number {
        EVENT_NUMBER => {
            let (_kind, _state) = (reader.int()?, reader.int()?);
            Frame::Event { path: reader.text()? }
        }
        PING_NUMBER => Frame::Pong,
        _ => Frame::Reply { number, zxid, error, body: reader.0 },
    })
}

/// Whether a frame replies to a login.
pub(crate) fn is_of_login(number: i32) -> bool {
    number == AUTH_NUMBER
}

/// The reply to a create: the path, which may have got a number, and the node.
pub(crate) fn created(body: &[u8]) -> Option<(String, Stat)> {
    let mut reader = Reader(body);
    Some((reader.text()?.to_owned(), reader.stat()?))
}

/// The reply to `exists` and `set_data`.
pub(crate) fn stat(body: &[u8]) -> Option<Stat> {
    Reader(body).stat()
}

/// The reply to `data`.
pub(crate) fn data(body: &[u8]) -> Option<(&[u8], Stat)> {
    let mut reader = Reader(body);
    Some((reader.bytes()?, reader.stat()?))
}

/// The reply to `children`: the names, without an order.
pub(crate) fn names(body: &[u8]) -> Option<Vec<&str>> {
    let mut reader = Reader(body);
    let count = usize::try_from(reader.int()?.max(0)).ok()?;
    (0..count).map(|_| reader.text()).collect()
}

/// The reply to `rights`: whether clients without a login may do more than read.
pub(crate) fn is_open(body: &[u8]) -> Option<bool> {
    let (mut reader, mut is_open) = (Reader(body), false);
    for _ in 0..reader.int()? {
        let (rights, scheme, _id) = (reader.int()?, reader.text()?, reader.text()?);
        is_open |= rights & !READ_RIGHT != 0 && ["world", "ip"].contains(&scheme);
    }
    Some(is_open)
}

/// The reply to a multi: the node that it has made, or the error of the part that has failed.
pub(crate) fn multi(body: &[u8]) -> Option<Result<Option<(String, Stat)>, i32>> {
    let (mut reader, mut made) = (Reader(body), None);
    loop {
        let (kind, is_end, _) = (reader.int()?, reader.take(1)? != [0], reader.int()?);
        match kind {
            _ if is_end => return Some(Ok(made)),
            // Zero: that part would have been executed. -2: it comes after the one that has failed.
            -1 => match reader.int()? {
                0 | -2 => {}
                error => return Some(Err(error)),
            },
            CREATE => made = Some((reader.text()?.to_owned(), reader.stat()?)),
            DELETE => {}
            _ => return None,
        }
    }
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    fn int(&mut self) -> Option<i32> {
        Some(i32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }

    fn long(&mut self) -> Option<i64> {
        Some(i64::from_be_bytes(self.take(8)?.try_into().ok()?))
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.int()?.max(0);
        self.take(usize::try_from(length).ok()?)
    }

    fn text(&mut self) -> Option<&'a str> {
        str::from_utf8(self.bytes()?).ok()
    }

    fn stat(&mut self) -> Option<Stat> {
        // The transactions that have made and changed the node.
        self.take(2 * 8)?;
        let (created_ms, changed_ms) = (self.long()?, self.long()?);
        // Three versions, the owner, the lengths of the data and of the children, and a
        // transaction.
        self.take(3 * 4 + 8 + 2 * 4 + 8)?;
        Some(Stat { created_ms, changed_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat_bytes() -> Vec<u8> {
        let mut bytes: Vec<u8> = [7, 8, 1_000, 2_000].iter().flat_map(|number: &i64| number.to_be_bytes()).collect();
        bytes.extend([0; 36]);
        bytes
    }

    fn reply(number: i32, error: i32, body: &[u8]) -> Vec<u8> {
        [&number.to_be_bytes()[..], &7_i64.to_be_bytes(), &error.to_be_bytes(), body].concat()
    }

    #[test]
    fn request_is_a_frame_with_number_and_kind() {
        let mut out = Vec::new();
        Request::delete("/a").write(3, &mut out);
        assert_eq!(out, [&18_u32.to_be_bytes()[..], &[0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 2], b"/a", &[255; 4]].concat());
    }

    #[test]
    fn node_of_a_user_is_private() {
        for (is_private, scheme) in [(true, "auth"), (false, "world")] {
            let request = Request::create("/a", b"x", Mode::Ephemeral, is_private);
            let text = String::from_utf8_lossy(&request.body).into_owned();
            assert!(text.contains(scheme), "{text:?}");
        }
    }

    #[test]
    fn frames_are_replies_pongs_and_events() {
        let frame = reply(4, NO_NODE, b"body");
        assert_eq!(parse(&frame), Some(Frame::Reply { number: 4, zxid: 7, error: NO_NODE, body: b"body" }));
        assert_eq!(parse(&reply(-2, 0, b"")), Some(Frame::Pong));
        let event = [&[0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 2][..], b"/a"].concat();
        assert_eq!(parse(&reply(-1, 0, &event)), Some(Frame::Event { path: "/a" }));
        assert!(is_of_login(-4) && !is_of_login(4));
    }

    #[test]
    fn replies_have_their_parts() {
        let node = [&[0, 0, 0, 2][..], b"/a", &stat_bytes()].concat();
        let stat = Stat { created_ms: 1_000, changed_ms: 2_000 };
        assert_eq!(created(&node), Some(("/a".to_owned(), stat)));
        assert_eq!(data(&node), Some((&b"/a"[..], stat)));
        assert_eq!(super::stat(&stat_bytes()), Some(stat));
        assert_eq!(names(&[0, 0, 0, 2, 0, 0, 0, 1, b'a', 0, 0, 0, 1, b'b']), Some(vec!["a", "b"]));
        let done = [&[255; 4][..], &[1], &[255; 4]].concat();
        let made = [&[0, 0, 0, 2, 0, 0, 0, 0, 0][..], &[0, 0, 0, 15, 0, 0, 0, 0, 0], &node, &done].concat();
        assert_eq!(multi(&made), Some(Ok(Some(("/a".to_owned(), stat)))));
        let part = |error: i32| [&[255; 4][..], &[0], &error.to_be_bytes(), &error.to_be_bytes()].concat();
        assert_eq!(multi(&[part(0), part(NO_NODE), part(-2), done].concat()), Some(Err(NO_NODE)));
    }

    /// A length that the frame does not have, and a count without its texts, allocate nothing.
    #[test]
    fn cut_reply_is_none() {
        let node = [&[0, 0, 0, 2][..], b"/a", &stat_bytes()].concat();
        for length in 0..node.len() {
            assert_eq!(created(&node[..length]), None, "{length}");
        }
        assert_eq!(names(&[127, 255, 255, 255]), None);
        assert_eq!(names(&[255; 4]), Some(Vec::new()), "none");
        assert_eq!(multi(&[0, 0, 0, 99, 0, 0, 0, 0, 0]), None);
        assert_eq!(connected(&[0; 15]), None);
    }
}
