//! What a page has for a keyboard, a screen reader and a small display.

use tower_lock::console::Access;
use tower_lock_testkit::locks::{key, store_and_locks};

use super::{app, operator, page, part, shown};

#[tokio::test]
async fn each_page_is_readable_without_sight_and_script() {
    let (_, locks) = store_and_locks();
    let guard = locks.lock(key()).await.expect("free");
    let app = app(&locks, operator());
    for (path, title) in [("", "Locks of "), ("/keys", "All keys"), ("/key?name=k", "One key"), ("/none", "Not Found")]
    {
        let (_, page) = page(&app, path).await;
        assert!(page.starts_with("<!doctype html>\n<html lang=\"en\">"), "{page}");
        assert!(part(&page, "<title>", "</title>").starts_with(title), "{page}");
        assert!(part(&page, "<h1>", "</h1>").starts_with(title), "{page}");
        for (element, count) in
            [("<h1>", 1), ("<main>", 1), ("<nav aria-label=", 1), ("<script", 0), ("style=", 0), ("onclick", 0)]
        {
            assert_eq!(page.matches(element).count(), count, "{element} in {page}");
        }
        assert_eq!(page.matches("<table").count(), page.matches("<caption>").count());
        assert_eq!(page.matches("<th scope=").count(), page.matches("<th").count() - page.matches("<thead").count());
        let fields = page.matches("<input id=").count();
        assert_eq!((fields, page.matches("<label for=").count()), (2, 2), "{page}");
    }
    drop(guard);
}

#[tokio::test]
async fn page_of_a_process_has_what_it_holds() {
    let (_, locks) = store_and_locks();
    let app = app(&locks, Access::Read);
    assert!(shown(&app, "").await.contains("Held by this process, oldest first: none."));
    let guard = locks.lock(key()).await.expect("free");
    let page = shown(&app, "").await;
    assert!(page.contains("<p id=\"answer\">This process holds 1 lock, permit or read.</p>"), "{page}");
    assert!(page.contains(&format!("<td>{}</td>", guard.fencing_token())), "{page}");
    guard.release().await.expect("up");
}
