//! Text over tokens that do not respect characters, and the ends of generations.

use super::*;

/// A reply of one-byte tokens: every multi-byte character is split.
fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn reply(text: &str) -> EngineHandle {
    start(MockModel::replying(2, bytes(text)), small())
}

#[test]
fn streamed_text_rejoins_to_the_whole_for_emoji_cjk_and_zwj() {
    for text in ["naïve café", "漢字かな交じり文", "🦀🚀", "👩‍👩‍👧‍👦 family", "🏳️‍🌈", "e\u{301} and 각"]
    {
        let engine = reply(text);
        let mut rx = engine.submit(request(&[1, 2], 200)).unwrap();
        let (mut pieces, mut tail) = (Vec::new(), String::new());
        while let Some(event) = rx.blocking_recv() {
            match event {
                Event::Token { read, .. } => pieces.push(read.text()),
                Event::Done { read, .. } => tail = read.text(),
                _ => {}
            }
        }
        assert_eq!(pieces.concat() + &tail, text);
        assert!(pieces.iter().all(|p| !p.contains('\u{fffd}')), "{pieces:?}");
        assert_eq!(pieces.len(), text.len(), "an event a token, text or not");
    }
}

#[test]
fn a_stop_string_ends_the_text_before_it_even_across_tokens_and_characters() {
    for (text, stop, want) in [
        ("hello STOP more", "STOP", "hello "),
        ("終わり。次", "。", "終わり"),
        ("ab🦀cd", "🦀", "ab"),
        ("STSTOP", "STOP", "ST"),
    ] {
        let mut r = request(&[1, 2], 200);
        r.stop = vec![b"never".to_vec(), stop.as_bytes().to_vec()];
        let heard = hear(reply(text).submit(r).unwrap());
        assert_eq!(heard.text, want);
        assert_eq!(heard.done().0, FinishReason::Stop);
    }
}

#[test]
fn what_only_looks_like_a_stop_string_is_released_in_the_end() {
    let mut r = request(&[1, 2], 200);
    r.stop = vec![b"STOP".to_vec()];
    let heard = hear(reply("wait STO").submit(r).unwrap());
    assert_eq!(heard.text, "wait STO");
}

#[test]
fn max_tokens_ends_with_length_and_the_text_so_far() {
    let heard = hear(reply("hello").submit(request(&[1, 2], 3)).unwrap());
    assert_eq!((heard.text.as_str(), heard.done().0), ("hel", FinishReason::Length));
}

#[test]
fn an_end_token_is_not_shown_and_can_be_ignored() {
    let eog = MockVocabulary::EOG;
    let heard = hear(reply("hi").submit(request(&[1, 2], 9)).unwrap());
    assert_eq!((heard.text.as_str(), heard.tokens.contains(&eog)), ("hi", false));
    let mut r = request(&[1, 2], 9);
    r.ignore_eos = true;
    let heard = hear(reply("hi").submit(r).unwrap());
    assert_eq!((heard.text.as_str(), heard.tokens.len(), heard.done().0), ("hi", 9, FinishReason::Length));
}

#[test]
fn a_role_mark_inside_a_reply_is_not_shown() {
    let reply = vec![u32::from(b'h'), MockVocabulary::BOS, u32::from(b'i')];
    let heard = hear(start(MockModel::replying(2, reply.clone()), small()).submit(request(&[1, 2], 9)).unwrap());
    assert_eq!((heard.text.as_str(), heard.tokens), ("hi", reply));
}

#[test]
fn logprobs_are_of_the_unmodified_distribution() {
    let model = MockModel::scripted(Box::new(|_, logits| {
        logits.fill(f32::NEG_INFINITY);
        for (l, p) in logits[65..].iter_mut().zip([0.5f32, 0.3, 0.2]) {
            *l = p.ln();
        }
    }));
    let engine = start(model, small());
    let mut r = request(&[1, 2], 1);
    r.logprobs = Some(2);
    // The bias makes the least likely token win; its reported probability stays the model's.
    r.sampling.logit_bias = vec![(67, 50.0)];
    let mut rx = engine.submit(r).unwrap();
    let mut seen = None;
    while let Some(event) = rx.blocking_recv() {
        if let Event::Token { token, logprob, .. } = event {
            seen = Some((token, logprob.unwrap()));
        }
    }
    let (token, logprob) = seen.unwrap();
    assert_eq!((token, logprob.token), (67, 67));
    assert!((logprob.logprob - 0.2f32.ln()).abs() < 1e-6);
    assert_eq!(logprob.top.iter().map(|t| t.0).collect::<Vec<_>>(), [65, 66]);
    assert!((logprob.top[1].1 - 0.3f32.ln()).abs() < 1e-6);
}
