//! Checks records: which sections leave them, how long they stand, and which requests they answer.

use tower_lock::store::Record;

/// Knows which sections have completed, and which record each key must have.
#[derive(Debug, Default)]
pub struct RecordChecker {
    /// By key.
    standing: Vec<Option<Standing>>,
    /// The records of the sections that ended in order while they were held.
    completed: Vec<Record>,
}

#[derive(Debug)]
struct Standing {
    record: Record,
    /// In milliseconds of the server's clock.
    until: i64,
}

impl RecordChecker {
    /// A checker for this number of keys.
    pub fn new(keys: usize) -> Self {
        Self { standing: (0..keys).map(|_| None).collect(), completed: Vec::new() }
    }

    /// Notes a section that has ended in order, with this record.
    pub fn completed(&mut self, record: &Record) {
        self.completed.push(record.clone());
    }

    /// The record that stands at `now`, in milliseconds of the server's clock.
    pub fn standing(&self, key: usize, now: i64) -> Option<&Record> {
        Some(&self.standing[key].as_ref().filter(|standing| now <= standing.until)?.record)
    }

    /// Notes a release of the holder of the key.
    ///
    /// # Errors
    ///
    /// Returns the violation: the section of the record has not completed.
    pub fn released(&mut self, key: usize, record: Record, until: i64) -> Result<(), String> {
        let is_completed = self.completed.contains(&record);
        let violation = format!("a section that has not completed leaves the record {}", head(&record));
        self.standing[key] = Some(Standing { record, until });
        if is_completed { Ok(()) } else { Err(violation) }
    }

    /// Compares the record of the store, with its end, to the record that must stand.
    ///
    /// # Errors
    ///
    /// Returns the violation: the store has another record.
    pub fn check_stored(&self, key: usize, now: i64, stored: Option<(Record, i64)>) -> Result<(), String> {
        let standing = self.standing[key].as_ref().filter(|standing| now <= standing.until);
        match (standing, stored) {
            (None, None) => Ok(()),
            (Some(standing), Some((record, until))) if standing.record == record && standing.until == until => Ok(()),
            (Some(standing), None) => Err(format!("removes or omits the record {}", head(&standing.record))),
            (None, Some((record, until))) => Err(format!("leaves the record {} until {until}", head(&record))),
            (Some(standing), Some((record, until))) => Err(format!(
                "leaves the record {} until {until} in place of {} until {}",
                head(&record),
                head(&standing.record),
                standing.until
            )),
        }
    }

    /// Forgets the expired records.
    pub fn expire(&mut self, now: i64) {
        for standing in &mut self.standing {
            standing.take_if(|standing| now > standing.until);
        }
    }

    /// Notes that the server has lost its data.
    pub fn flushed(&mut self) {
        self.standing.fill_with(|| None);
    }
}

/// The head of a record, for display.
pub fn head(record: &Record) -> String {
    String::from_utf8_lossy(&record.head).into_owned()
}
