use std::{collections::VecDeque, future::Future, io, net::SocketAddr};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    runtime::Handle,
    sync::{mpsc, oneshot},
};

use crate::report::{Reply, Report};

/// A connection to the checker. Reports arrive in order, even if their replies are not awaited.
#[derive(Clone, Debug)]
pub struct Reporter {
    reports: mpsc::UnboundedSender<(Report, oneshot::Sender<Reply>)>,
}

impl Reporter {
    /// Connects to the checker.
    ///
    /// # Errors
    ///
    /// Fails if the checker does not listen.
    pub async fn connect(checker: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(checker).await?;
        stream.set_nodelay(true)?;
        let (from, mut to) = stream.into_split();
        let (reports, mut to_send) = mpsc::unbounded_channel::<(Report, oneshot::Sender<Reply>)>();
        let (sent, mut to_answer) = mpsc::unbounded_channel();
        let runtime = Handle::current();
        runtime.spawn(async move {
            let mut batch = Vec::new();
            while to_send.recv_many(&mut batch, 256).await > 0 {
                let mut lines = String::new();
                for (report, answer) in batch.drain(..) {
                    lines.push_str(&format!("{report}\n"));
                    let _ = sent.send(answer);
                }
                if to.write_all(lines.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        runtime.spawn(async move {
            let mut lines = BufReader::new(from).lines();
            let mut waiting = VecDeque::new();
            while let Ok(Some(line)) = lines.next_line().await {
                while let Ok(answer) = to_answer.try_recv() {
                    waiting.push_back(answer);
                }
                let Some(answer): Option<oneshot::Sender<Reply>> = waiting.pop_front() else { return };
                let _ = answer.send(Reply::from(&*line));
            }
        });
        Ok(Self { reports })
    }

    /// Sends a report at once; the future is the reply.
    ///
    /// # Panics
    ///
    /// The future panics if the checker has ended: the storm has no result then.
    pub fn report(&self, report: Report) -> impl Future<Output = Reply> + use<> {
        let (answer, answered) = oneshot::channel();
        let _ = self.reports.send((report, answer));
        async { answered.await.expect("the checker is there") }
    }
}
