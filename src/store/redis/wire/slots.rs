//! The hash slots of a Cluster. Pure.

use std::sync::LazyLock;

/// The number of slots.
pub const SLOTS: u16 = 16_384;

/// For each slot, the smallest number whose text is in it. Numbers below 110,000 cover all slots.
static TAGS: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let mut tags = vec![0; usize::from(SLOTS)];
    for number in (0..110_000_u32).rev() {
        tags[usize::from(crc16(number.to_string().bytes()) % SLOTS)] = number;
    }
    tags
});

/// The slot of a name: of its first part in braces, if that is not empty.
pub(super) fn slot_of(name: &str) -> u16 {
    slot_of_parts(["", "", name])
}

/// The slot of a name in parts. Only the last one may have braces.
pub(super) fn slot_of_parts(parts: [&str; 3]) -> u16 {
    let [.., last] = parts;
    let tag = last.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    match tag.filter(|tag| !tag.is_empty()) {
        Some(tag) => crc16(tag.bytes()) % SLOTS,
        None => crc16(parts.into_iter().flat_map(str::bytes)) % SLOTS,
    }
}

/// A text whose slot is this one.
pub fn tag_of(slot: u16) -> u32 {
    TAGS[usize::from(slot % SLOTS)]
}

/// CRC-16/XMODEM.
fn crc16(bytes: impl Iterator<Item = u8>) -> u16 {
    bytes.fold(0, |crc, byte| (crc << 8) ^ CRC_OF_BYTES[usize::from((crc >> 8) as u8 ^ byte)])
}

static CRC_OF_BYTES: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0_u16;
    while byte < 256 {
        let (mut crc, mut bit) = (byte << 8, 0);
        while bit < 8 {
            crc = (crc << 1) ^ if crc & 0x8000 == 0 { 0 } else { 0x1021 };
            bit += 1;
        }
        table[byte as usize] = crc;
        byte += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        assert_eq!(crc16("123456789".bytes()), 0x31C3);
        for (name, slot) in [("x", 16_287), ("{x}q", 16_287), ("a{x}b{y}", 16_287), ("foo", 12_182), ("", 0)] {
            assert_eq!(slot_of(name), slot, "{name}");
        }
        // Without a part in braces, the whole name counts.
        for name in ["{}x", "{x", "x}"] {
            assert_eq!(slot_of(name), crc16(name.bytes()) % SLOTS, "{name}");
        }
    }

    #[test]
    fn every_slot_has_a_tag() {
        for slot in 0..SLOTS {
            assert_eq!(slot_of(&format!("f:{{{}}}", tag_of(slot))), slot);
        }
        assert_eq!(TAGS.iter().max(), Some(&109_757));
    }
}
