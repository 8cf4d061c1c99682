//! The HTTP clients of the question `http`, in a process of their own: one thread, one request at a
//! time on each connection, the next as soon as a response is complete or at a fixed rate.

use std::{cell::RefCell, fmt::Write as _, rc::Rc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::{LocalSet, spawn_local},
    time::{MissedTickBehavior, interval, timeout},
};

use crate::measure::{nanos, quantile_us};

/// A connection to the server.
struct Connection {
    socket: TcpStream,
    path: Rc<str>,
    request: String,
    response: Vec<u8>,
}

/// The times of the requests, and the time of all of them.
pub struct Load {
    pub latencies: Vec<u64>,
    pub nanos: u64,
}

/// Sends requests on so many connections, each after the response to the one before.
pub async fn closed(port: u16, path: &str, connections: u64, seconds: f64) -> Load {
    let path = Rc::<str>::from(path);
    let mut open = Vec::new();
    for _ in 0..connections {
        open.push(Connection::open(port, Rc::clone(&path)).await);
    }
    let began = nanos();
    let end = began + (seconds * 1e9) as u64;
    let client = |mut connection: Connection, first: u64| async move {
        let mut latencies = Vec::new();
        let mut now = nanos();
        for number in first.. {
            if now >= end {
                break;
            }
            connection.request(number).await;
            let after = nanos();
            latencies.push(after - now);
            now = after;
        }
        latencies
    };
    let run = async {
        let clients = open.into_iter().zip(1..).map(|(connection, number)| client(connection, number * 1_000_000));
        let clients: Vec<_> = clients.map(spawn_local).collect();
        let mut latencies = Vec::new();
        for client in clients {
            latencies.extend(client.await.expect("no panic"));
        }
        latencies
    };
    let latencies = LocalSet::new().run_until(run).await;
    Load { latencies, nanos: nanos() - began }
}

/// Sends a request each millisecond, also while others have no response. The time of a request
/// starts when it is sent.
pub async fn open(port: u16, path: &str, seconds: f64) -> Load {
    let path = Rc::<str>::from(path);
    let idle = Rc::new(RefCell::new(Vec::new()));
    let began = nanos();
    let run = async {
        let mut ticks = interval(Duration::from_millis(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut requests = Vec::new();
        for number in 0..(seconds * 1e3) as u64 {
            ticks.tick().await;
            let (idle, path) = (Rc::clone(&idle), Rc::clone(&path));
            requests.push(spawn_local(async move {
                let open = idle.borrow_mut().pop();
                let mut connection = match open {
                    Some(connection) => connection,
                    None => Connection::open(port, path).await,
                };
                let sent = nanos();
                connection.request(1_000_000 + number).await;
                let latency = nanos() - sent;
                idle.borrow_mut().push(connection);
                latency
            }));
        }
        let mut latencies = Vec::new();
        for request in requests {
            latencies.push(request.await.expect("no panic"));
        }
        latencies
    };
    let latencies = LocalSet::new().run_until(run).await;
    Load { latencies, nanos: nanos() - began }
}

// === impl Connection ===

impl Connection {
    async fn open(port: u16, path: Rc<str>) -> Self {
        let socket = TcpStream::connect(("127.0.0.1", port)).await.expect("a connection");
        socket.set_nodelay(true).expect("an option");
        Self { socket, path, request: String::new(), response: Vec::new() }
    }

    /// Waits for the whole response.
    async fn request(&mut self, family: u64) {
        let body = format!(r#"{{"family_id":{family},"reward_type":1}}"#);
        let (path, length) = (&self.path, body.len());
        self.request.clear();
        let _ = write!(
            self.request,
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.socket.write_all(self.request.as_bytes()).await.expect("a connection");
        self.response.clear();
        while !self.is_complete() {
            let read = timeout(Duration::from_secs(10), self.socket.read_buf(&mut self.response)).await;
            let read = read.expect("a response").expect("a connection");
            assert!(read > 0, "the server closed the connection");
        }
        assert!(self.response.starts_with(b"HTTP/1.1 201 "), "{}", String::from_utf8_lossy(&self.response));
    }

    fn is_complete(&self) -> bool {
        let Some(head) = self.response.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return false };
        let text = std::str::from_utf8(&self.response[..head]).expect("text");
        let length = text.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
        self.response.len() >= head + 4 + length.expect("a length")
    }
}

// === impl Load ===

impl Load {
    /// Requests, seconds, and the median and 99th percentile in microseconds.
    pub fn print(mut self) {
        let (p50, p99) = (quantile_us(&mut self.latencies, 0.5), quantile_us(&mut self.latencies, 0.99));
        println!("{} {} {p50} {p99}", self.latencies.len(), self.nanos as f64 / 1e9);
    }
}
