//! The gRPC control service of a real owner: loads and their ends, epochs, watching, health, reflection.

mod support;

use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use ds4_os::stats::fd_count;
use ds4_proto::broker::{Message, codes};
use ds4_proto::v1;
use ds4_proto::v1::ModelState::{Draining, Failed, Loading, Ready, Released};
use nix::sys::signal::{Signal, kill};
use support::{Dir, Owner, load_request, receive};
use tonic::Code;

fn empty_owner(args: &[&str]) -> Owner {
    Owner::start(Dir::new(), args)
}

fn last(said: &[v1::LoadProgress]) -> &v1::LoadProgress {
    said.last().expect("a load says something")
}

async fn models(owner: &Owner) -> Vec<v1::Model> {
    owner.control().await.list(v1::ListRequest {}).await.unwrap().into_inner().models
}

async fn status(owner: &Owner) -> v1::StatusReply {
    owner.control().await.status(v1::StatusRequest {}).await.unwrap().into_inner()
}

#[tokio::test]
async fn l1_a_load_reports_its_plan_and_gib_per_s_of_each_stage() {
    let owner = empty_owner(&[]);
    let path = owner.dir.join("big.gguf");
    support::write_big(&path, 1);
    let said = owner.load(load_request(&path)).await;
    let end = last(&said);
    assert_eq!((end.state(), end.model.as_str(), end.epoch), (Ready, "tiny-1", 1), "{end:?}");
    let plan = said.iter().find_map(|p| p.plan.clone()).unwrap();
    assert!(plan.fits && plan.weight_bytes >= 128 << 20 && plan.weight_bytes < 129 << 20, "{plan:?}");
    assert!(plan.metadata_bytes > 500 && plan.reserve_bytes == 64 << 20 && plan.available_bytes > plan.weight_bytes);
    assert!(!plan.available_source.is_empty());
    for stage in ["read", "hash"] {
        let done = said.iter().find(|p| p.stage == stage && p.gib_per_s > 0.0).unwrap();
        assert_eq!((done.done_bytes, done.state()), (plan.weight_bytes, Loading));
        assert!(
            owner.log().contains(&format!("stage=\"{stage}\"")) && owner.log().contains("gib_per_s="),
            "{}",
            owner.log()
        );
    }
    let model = models(&owner).await.remove(0);
    assert_eq!((model.state(), model.bytes, model.done_bytes), (Ready, plan.weight_bytes, plan.weight_bytes));
    assert_eq!((model.blake3.as_str(), model.family.as_str()), (end.blake3.as_str(), "llama"));
    assert!(model.loaded_s > 0.0);
    let status = status(&owner).await;
    assert_eq!((status.weight_bytes, status.pid, status.backend.as_str()), (plan.weight_bytes, owner.pid(), "memfd"));
    assert!(status.rss_bytes < 20 << 20, "the daemon takes {} bytes beside 128 MiB of weights", status.rss_bytes);
}

#[tokio::test]
async fn l8_bad_models_fail_with_a_state_and_a_code() {
    let owner = empty_owner(&[]);
    let path = owner.dir.join("m.gguf");
    for (content, code) in [(None, "file_not_found"), (Some("<html>"), "not_a_gguf"), (Some("GGUF"), "truncated_file")]
    {
        if let Some(content) = content {
            fs::write(&path, content).unwrap();
        }
        let said = owner.load(load_request(&path)).await;
        assert_eq!((last(&said).state(), last(&said).error_code.as_str()), (Failed, code));
        assert!(last(&said).error.contains("m.gguf"), "{said:?}");
        let held = models(&owner).await;
        assert_eq!((held.len(), held[0].state(), held[0].error_code.as_str()), (1, Failed, code));
    }
    // The same path, put right, loads.
    support::write_tiny(&path, 3);
    assert_eq!(last(&owner.load(load_request(&path)).await).state(), Ready);
    assert_eq!(models(&owner).await.len(), 1);
}

#[tokio::test]
async fn loads_and_failures_leave_no_descriptors() {
    let owner = empty_owner(&[]);
    let (good, bad) = (owner.dir.tiny(1), owner.dir.join("bad.gguf"));
    fs::write(&bad, "<html>").unwrap();
    let mut control = owner.control().await;
    let mut settled = Vec::new();
    for _ in 0..3 {
        for _ in 0..10 {
            for request in [load_request(&bad), v1::LoadRequest { reload: true, ..load_request(&good) }] {
                let mut stream = control.load(request).await.unwrap().into_inner();
                while stream.message().await.unwrap().is_some() {}
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        settled.push((fd_count(Some(owner.pid())).unwrap(), models(&owner).await.len()));
    }
    // One READY epoch and one remembered failure, however often.
    assert_eq!(settled[0].1, 2);
    assert!(settled.iter().all(|s| *s == settled[0]), "{settled:?}");
}

#[tokio::test]
async fn bad_requests_are_refused_by_status() {
    let owner = empty_owner(&[]);
    let mut control = owner.control().await;
    let bad = [
        v1::LoadRequest { path: "relative.gguf".into(), ..Default::default() },
        v1::LoadRequest { path: "/m".into(), expect_blake3: "12".into(), ..Default::default() },
        v1::LoadRequest { path: "/m".into(), deadline_s: u32::MAX, ..Default::default() },
    ];
    for request in bad {
        assert_eq!(control.load(request).await.unwrap_err().code(), Code::InvalidArgument);
    }
    let unknown = v1::UnloadRequest { model: "nobody".into(), ..Default::default() };
    let status = control.unload(unknown).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert!(status.message().contains("nobody") && status.message().contains("none"), "{status:?}");
}

#[tokio::test]
async fn m8_a_load_that_does_not_fit_fails_before_it_allocates() {
    let owner = empty_owner(&["--reserve-mib", "1000000000"]);
    let path = owner.dir.tiny(1);
    let said = owner.load(load_request(&path)).await;
    assert_eq!((last(&said).state(), last(&said).error_code.as_str()), (Failed, "not_enough_memory"));
    assert!(last(&said).error.contains("are missing"), "{said:?}");
    assert!(said.iter().any(|p| p.plan.as_ref().is_some_and(|plan| !plan.fits)));
    assert!(!said.iter().any(|p| p.stage == "read"));
}

#[tokio::test]
async fn a_dry_run_leaves_no_trace() {
    let owner = empty_owner(&[]);
    let path = owner.dir.tiny(1);
    let said = owner.load(v1::LoadRequest { dry_run: true, ..load_request(&path) }).await;
    assert!(said.iter().any(|p| p.plan.as_ref().is_some_and(|plan| plan.fits)), "{said:?}");
    assert!(last(&said).error_code.is_empty() && last(&said).state() != Ready);
    assert!(models(&owner).await.is_empty());
}

#[tokio::test]
async fn a_second_load_of_the_same_model_joins_the_one_in_flight() {
    let owner = empty_owner(&[]);
    let path = owner.dir.join("big.gguf");
    support::write_big(&path, 1);
    // Another spelling of the same path.
    let other = owner.dir.join("run/../big.gguf");
    let (first, second, refused, ()) = tokio::join!(
        owner.load(load_request(&path)),
        async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            owner.load(load_request(&other)).await
        },
        async {
            tokio::time::sleep(Duration::from_millis(30)).await;
            let renamed = v1::LoadRequest { name: "else".into(), ..load_request(&path) };
            owner.control().await.load(renamed).await.map(drop).unwrap_err()
        },
        async {
            tokio::time::sleep(Duration::from_millis(1)).await;
            let loader = owner.freeze_loader();
            tokio::time::sleep(Duration::from_millis(150)).await;
            let (code, sentence) = owner.attach("").err().unwrap();
            assert_eq!(code, codes::MODEL_LOADING, "{sentence}");
            kill(loader, Signal::SIGCONT).unwrap();
        }
    );
    assert_eq!((last(&first).state(), last(&first).epoch), (Ready, 1));
    assert_eq!((last(&second).state(), last(&second).epoch), (Ready, 1));
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(
        refused.message().contains("load_in_flight") && refused.message().contains("under its own name"),
        "{refused:?}"
    );
    assert_eq!(models(&owner).await.len(), 1);
}

#[tokio::test]
async fn the_same_content_keeps_its_epoch_and_a_reload_replaces_it() {
    let owner = empty_owner(&[]);
    let path = owner.dir.tiny(1);
    let first = last(&owner.load(load_request(&path)).await).clone();
    let reader = owner.attach("").unwrap();
    let again = owner.load(load_request(&path)).await;
    assert_eq!((last(&again).state(), last(&again).epoch), (Ready, first.epoch));
    assert!(again.iter().any(|p| p.stage == "verify"), "{again:?}");
    // A copy elsewhere is the same content, too.
    let copy = owner.dir.join("copy.gguf");
    fs::copy(&path, &copy).unwrap();
    assert_eq!(last(&owner.load(load_request(&copy)).await).epoch, first.epoch);
    assert_eq!(models(&owner).await.len(), 1);
    let fds = fd_count(Some(owner.pid())).unwrap();

    let reloaded = owner.load(v1::LoadRequest { reload: true, ..load_request(&path) }).await;
    assert!(last(&reloaded).epoch > first.epoch);
    assert_eq!(last(&reloaded).blake3, first.blake3);
    let states: Vec<_> = models(&owner).await.iter().map(|m| (m.epoch, m.state(), m.leases)).collect();
    assert_eq!(states, [(first.epoch, Draining, 1), (last(&reloaded).epoch, Ready, 0)]);
    match receive(&reader.connection).0 {
        Message::Drain { deadline_s, reason } => {
            assert_eq!(deadline_s, 0);
            assert!(reason.contains("replaced"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(owner.attach("").unwrap().epoch, last(&reloaded).epoch);
    drop(reader);
    // The lease's descriptor and the old epoch's two are gone, the new epoch's two are there.
    support::eventually("the old epoch is released", || (fd_count(Some(owner.pid())).unwrap() < fds).then_some(()));
    assert_eq!(models(&owner).await.len(), 1);
}

#[tokio::test]
async fn l2_a_changed_byte_of_the_same_size_and_time_is_other_content() {
    let owner = empty_owner(&[]);
    let path = owner.dir.tiny(1);
    let first = last(&owner.load(load_request(&path)).await).clone();
    let before = fs::metadata(&path).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0xee], before.len() - 1000).unwrap();
    file.set_times(fs::FileTimes::new().set_modified(before.modified().unwrap())).unwrap();
    drop(file);
    let second = last(&owner.load(load_request(&path)).await).clone();
    assert_eq!((second.state(), second.model.as_str()), (Ready, "tiny-1"));
    assert!(second.epoch > first.epoch);
    assert_ne!(second.blake3, first.blake3);
    // Whoever wants the old bytes is told so, by the broker and by a load.
    let old = *blake3::Hash::from_hex(&first.blake3).unwrap().as_bytes();
    let (code, sentence) = support::attach(&owner.broker(), "tiny-1", Some(old)).err().unwrap();
    assert_eq!(code, codes::CONTENT_MISMATCH);
    assert!(sentence.contains(&first.blake3) && sentence.contains(&second.blake3), "{sentence}");
    let expecting = v1::LoadRequest { expect_blake3: first.blake3.clone(), ..load_request(&path) };
    let said = owner.load(expecting).await;
    assert_eq!((last(&said).state(), last(&said).error_code.as_str()), (Failed, "content_mismatch"));
    assert!(models(&owner).await.iter().any(|m| m.state() == Ready && m.blake3 == second.blake3));
}

#[tokio::test]
async fn another_model_does_not_take_a_name_unasked() {
    let owner = empty_owner(&[]);
    let (one, two) = (owner.dir.tiny(1), owner.dir.tiny(2));
    let named = |path| v1::LoadRequest { name: "m".into(), ..load_request(path) };
    assert_eq!(last(&owner.load(named(&one)).await).state(), Ready);
    let said = owner.load(named(&two)).await;
    assert_eq!((last(&said).state(), last(&said).error_code.as_str()), (Failed, "name_taken"));
    assert!(last(&said).error.contains("tiny-1.gguf"), "{said:?}");
    assert_eq!(last(&owner.load(v1::LoadRequest { reload: true, ..named(&two) }).await).state(), Ready);
    assert_eq!(last(&owner.load(load_request(&one)).await).model, "tiny-1");
    let names: Vec<String> = models(&owner).await.into_iter().filter(|m| m.state() == Ready).map(|m| m.name).collect();
    assert_eq!(names, ["m", "tiny-1"]);
    assert_eq!(owner.attach("").err().unwrap().0, codes::AMBIGUOUS_MODEL);
    assert_eq!(owner.attach("m").unwrap().model, "m");
}

#[tokio::test]
async fn a_killed_loader_is_a_failure_with_a_cause_and_the_next_load_works() {
    let owner = empty_owner(&[]);
    let path = owner.dir.join("big.gguf");
    support::write_big(&path, 1);
    let fds = fd_count(Some(owner.pid())).unwrap();
    let (said, ()) = tokio::join!(owner.load(load_request(&path)), async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        kill(owner.freeze_loader(), Signal::SIGKILL).unwrap();
    });
    assert_eq!((last(&said).state(), last(&said).error_code.as_str()), (Failed, "loader_killed"));
    assert!(last(&said).error.contains("signal 9"), "{said:?}");
    let held = models(&owner).await;
    assert_eq!((held[0].state(), held[0].error_code.as_str()), (Failed, "loader_killed"));
    assert_eq!(status(&owner).await.weight_bytes, 0);
    assert_eq!(owner.attach("").err().unwrap().0, codes::MODEL_FAILED);
    support::eventually("descriptors are closed", || (fd_count(Some(owner.pid())).unwrap() <= fds + 2).then_some(()));
    assert_eq!(last(&owner.load(load_request(&path)).await).state(), Ready);
    assert!(owner.attach("").is_ok());
}

#[tokio::test]
async fn l8_a_load_that_hangs_ends_at_its_deadline() {
    let owner = empty_owner(&[]);
    let path = owner.dir.join("big.gguf");
    support::write_big(&path, 1);
    let start = Instant::now();
    let (said, loader) = tokio::join!(owner.load(v1::LoadRequest { deadline_s: 1, ..load_request(&path) }), async {
        tokio::time::sleep(Duration::from_millis(1)).await;
        owner.freeze_loader()
    });
    assert_eq!((last(&said).state(), last(&said).error_code.as_str()), (Failed, "load_deadline"));
    assert!(last(&said).error.contains("--load-deadline"), "{said:?}");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    support::eventually("the loader is gone", || kill(loader, None).is_err().then_some(()));
    assert_eq!(last(&owner.load(load_request(&path)).await).state(), Ready);
}

#[tokio::test]
async fn a_stop_during_a_load_ends_the_loader() {
    let mut owner = empty_owner(&[]);
    let path = owner.dir.join("big.gguf");
    support::write_big(&path, 1);
    let mut stream = owner.control().await.load(load_request(&path)).await.unwrap().into_inner();
    let loader = owner.freeze_loader();
    owner.signal(Signal::SIGTERM);
    let status = support::wait(&mut owner.child, support::LIMIT).expect("stops");
    assert_eq!(status.code(), Some(0));
    support::eventually("the loader is gone", || kill(loader, None).is_err().then_some(()));
    // The stream ends, by a failure or by the hang-up.
    while let Ok(Some(progress)) = stream.message().await {
        assert_ne!(progress.state(), Ready);
    }
}

#[tokio::test]
async fn l6_unload_waits_for_readers() {
    let owner = empty_owner(&[]);
    let path = owner.dir.tiny(1);
    owner.load(load_request(&path)).await;
    let reader = owner.attach("").unwrap();
    let mut control = owner.control().await;
    let (reply, ()) =
        tokio::join!(control.unload(v1::UnloadRequest { model: "tiny-1".into(), epoch: 0, deadline_s: 60 }), async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            match receive(&reader.connection).0 {
                Message::Drain { deadline_s, .. } => assert_eq!(deadline_s, 60),
                other => panic!("{other:?}"),
            }
            assert_eq!(owner.attach("").err().unwrap().0, codes::MODEL_DRAINING);
            assert_eq!(models(&owner).await[0].state(), Draining);
            drop(reader);
        });
    let reply = reply.unwrap().into_inner();
    assert_eq!((reply.epochs, reply.leases_waited_for), (1, 1));
    assert!(models(&owner).await.is_empty());
    assert_eq!(owner.attach("").err().unwrap().0, codes::NO_MODEL);
}

#[tokio::test]
async fn watch_begins_with_what_is_and_goes_on_with_what_happens() {
    let owner = empty_owner(&[]);
    let path = owner.dir.tiny(1);
    owner.load(load_request(&path)).await;
    let mut events = owner.control().await.watch(v1::WatchRequest {}).await.unwrap().into_inner();
    let mut next = async || {
        let event = tokio::time::timeout(support::LIMIT, events.message()).await.unwrap().unwrap().unwrap();
        let model = event.model.unwrap();
        (model.state(), model.leases)
    };
    assert_eq!(next().await, (Ready, 0));
    let reader = owner.attach("").unwrap();
    assert_eq!(next().await, (Ready, 1));
    drop(reader);
    assert_eq!(next().await, (Ready, 0));
    let unload = v1::UnloadRequest { model: "tiny-1".into(), ..Default::default() };
    owner.control().await.unload(unload).await.unwrap();
    assert_eq!(next().await, (Draining, 0));
    assert_eq!(next().await, (Released, 0));
}

#[tokio::test]
async fn health_and_both_reflections_answer() {
    use tonic_health::pb::health_client::HealthClient;
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};
    use tonic_reflection::pb::{v1 as r1, v1alpha as ra};

    let owner = empty_owner(&[]);
    let channel = owner.channel().await;
    for service in ["", "ds4.v1.Owner"] {
        let request = HealthCheckRequest { service: service.into() };
        let reply = HealthClient::new(channel.clone()).check(request).await.unwrap().into_inner();
        assert_eq!(reply.status(), ServingStatus::Serving, "{service:?}");
    }
    let unknown = HealthCheckRequest { service: "nobody".into() };
    assert_eq!(HealthClient::new(channel.clone()).check(unknown).await.unwrap_err().code(), Code::NotFound);

    let request = r1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(r1::server_reflection_request::MessageRequest::ListServices(String::new())),
    };
    let mut client = r1::server_reflection_client::ServerReflectionClient::new(channel.clone());
    let mut replies = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let reply = replies.message().await.unwrap().unwrap().message_response.unwrap();
    let r1::server_reflection_response::MessageResponse::ListServicesResponse(list) = reply else {
        panic!("{reply:?}")
    };
    let names: Vec<String> = list.service.into_iter().map(|s| s.name).collect();
    assert!(names.contains(&"ds4.v1.Owner".into()) && names.contains(&"grpc.health.v1.Health".into()), "{names:?}");
    assert!(!names.contains(&"ds4.v1.Worker".into()), "{names:?}");

    let request = ra::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(ra::server_reflection_request::MessageRequest::FileContainingSymbol(
            "ds4.v1.Owner".into(),
        )),
    };
    let mut client = ra::server_reflection_client::ServerReflectionClient::new(channel);
    let mut replies = client.server_reflection_info(tokio_stream::iter([request])).await.unwrap().into_inner();
    let reply = replies.message().await.unwrap().unwrap().message_response.unwrap();
    let ra::server_reflection_response::MessageResponse::FileDescriptorResponse(files) = reply else {
        panic!("{reply:?}")
    };
    let file = String::from_utf8_lossy(&files.file_descriptor_proto[0]).into_owned();
    for method in ["Load", "Unload", "List", "Status", "Leases", "Watch"] {
        assert!(file.contains(method), "{method}");
    }
}
